"""What gossip is made of: mixing graphs, edges that compress by differences, and asynchronous pairs."""
