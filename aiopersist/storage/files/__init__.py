"""A blob store in a folder: `blob`, and folders that others may remove while files are moved into them."""
