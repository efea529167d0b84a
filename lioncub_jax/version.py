"""The version, which metadata of an installation would say only where there is one."""

__version__ = "0.5.0"
