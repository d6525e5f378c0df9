"""The simulator in a real browser: `make test-browser`."""
