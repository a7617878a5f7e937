"""A blob store in an S3 bucket, or in any store of the same protocol: `blob` keeps the contract, `errors`
maps errors."""
