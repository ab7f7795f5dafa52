"""Stands in for a package that only notebooks need."""  # noqa: N999
