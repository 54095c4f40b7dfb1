"""What a folder on disk holds: dataclasses as JSON and arrays, and immutable versions of them."""
