"""The version, which the build of a release reads here too."""

__version__ = "0.1.0"
