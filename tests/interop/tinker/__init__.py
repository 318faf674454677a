"""The server of Tinker's API, used by its own SDK and the recipes of its cookbook, unchanged."""
