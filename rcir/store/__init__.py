"""Storage on disk: frozen dataclasses as JSON and arrays, in folders of immutable versions."""
