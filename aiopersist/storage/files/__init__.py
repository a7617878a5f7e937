"""A blob store in a folder: `blob` keeps the contract; `open_folders` has its open folders."""
