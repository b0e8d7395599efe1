"""What a training step costs on a network: its computation, its calls as a timeline, and the choice of codecs."""
