"""A store in an S3 bucket, or in any store of the same protocol: `blob` and `bucket` keep the contracts,
`client` makes requests, which `session` sends once, `errors` maps errors."""
