"""The version, in one place: setup.py and pyproject.toml read it without importing the package."""

__version__ = "0.1.0"
