"""Parameter servers: weights in shards, on threads or ranks that workers push to and pull from at any time."""
