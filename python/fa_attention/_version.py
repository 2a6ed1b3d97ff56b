"""The version, that of include/fa/version.h."""

__version__ = "0.1.0"
