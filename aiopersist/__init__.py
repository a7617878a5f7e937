"""Durable, definite, time-varying collections for asyncio."""
