"""What the exchange of gradients costs, and where its time goes."""
