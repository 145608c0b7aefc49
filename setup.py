"""For tools that look for this file; pyproject.toml has everything."""

from setuptools import setup

setup()
