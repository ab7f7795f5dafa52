"""What a worker keeps, and where: axes, views, workers, block tables."""
