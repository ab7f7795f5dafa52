"""Which bytes move from where to where: from two descriptions to the ids of a request."""
