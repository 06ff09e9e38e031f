"""The served chain on the real server."""
