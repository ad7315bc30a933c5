"""What codecs lose: errors, parity of training, assumptions of proofs."""
