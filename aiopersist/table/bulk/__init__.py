"""Puts of any number of entries, also in place of all contents: `put_many` is the call, `bulk` stages and
commits, `replacing` computes the updates by columns."""
