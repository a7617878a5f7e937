"""The programs of a world. Each is `async (scene, name, client)`, runs on a machine that crashes, and goes on
from the ledger when it starts again."""
