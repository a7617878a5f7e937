"""A schema with fields, for conditions."""

from datetime import date, datetime
from decimal import Decimal

from pydantic import BaseModel

import aiopersist as ap


class Sale(BaseModel):
    amount: int
    shop: str | None = None
    at: datetime | None = None
    day: date | None = None
    price: Decimal | None = None
    photo: bytes = b""


SALES = ap.Schema(key=str, val=Sale)
