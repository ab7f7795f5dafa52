"""From a model's config.json to the workers of an engine."""
