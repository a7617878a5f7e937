"""Helpers that tests of several folders share: locations, clocks, schemas, faults. Nothing here is a test."""
