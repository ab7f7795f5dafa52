"""Stands in for a package that only images and sounds need."""

from sgl_kernel import __getattr__  # noqa: F401
