"""A blob store in a folder: `blob` keeps the contract; `open_folders` has the open folders that files move
into."""
