"""A blob store in an S3 bucket, or in any store that speaks its protocol: `blob`, and what `errors` mean."""
