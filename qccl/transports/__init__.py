"""How bytes move between ranks that have met: over MPI, UCX, between sites, gloo, or among threads."""
