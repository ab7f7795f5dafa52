"""Stands in for a package that only notebooks need."""

HTML = display = None
