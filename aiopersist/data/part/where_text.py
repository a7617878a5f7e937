"""Conditions as text, for a command line or a page: `key >= "a" and val.amount > 3`.

    condition  = and_ {"or" and_}
    and_       = not_ {"and" not_}
    not_       = "not" not_ | comparison
    comparison = operand [sign operand | ["not"] "in" "(" value {"," value} ")" | "is" ["not"] "null"]
               | "(" condition ")"
    operand    = value | column
    sign       = "=" | "==" | "!=" | "<>" | "<" | "<=" | ">" | ">="
    value      = number | text | "true" | "false"

A column is `key`, `val`, or a field of a struct: by its path (`val.amount`), or by its name if only one field
has it. Any other name is in backticks. A text is in single or double quotes; a quote within it is doubled.
The text takes the type of the column that it is compared with: an instant, a date, a decimal, bytes. Words
may be in capitals.

As in SQL, a comparison with null is neither true nor false, and only rows for which the condition is true are
kept. The text becomes a `pyarrow.compute` expression; no part of the text is executed.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from decimal import ROUND_FLOOR, Context, Decimal
from typing import Any, NamedTuple

from aiopersist.base.errors import InvalidUsage, UsageKind
from aiopersist.data.lazy import pa, pc
from aiopersist.data.part.select import check_where, resolve_columns
from aiopersist.data.types.schema import Schema

TOKENS_MAX = 2_000  # Arrow walks an expression recursively
DEPTH_MAX = 50  # of parentheses and `not`

_NAME = r"(?:[^\W\d]\w*|`[^`]+`)"
_TOKEN = re.compile(
    rf"""\s*(?:(?P<number>\d+(?:\.\d+)?(?:[eE][+-]?\d+)?(?![\w.]))
    |(?P<text>'(?:[^']|'')*'|"(?:[^"]|"")*")
    |(?P<name>{_NAME}(?:\.{_NAME})*)
    |(?P<sign><=|>=|<>|!=|==|[=<>(),-])
    |(?P<end>\Z))""",
    re.VERBOSE,
)
_SIGNS: dict[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<>": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
EQUAL, UNEQUAL, LESS = {"=", "=="}, {"!=", "<>"}, {"<", "<="}
_TURNED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
DIGITS_MAX = 80  # before or behind the point: more than any type holds
_WORDS = {"and", "or", "not", "in", "is", "null", "true", "false"}


def parse_where(text: str, schema: Schema[Any, Any, Any]) -> Any:
    """The condition of `text`, for `where=` of snapshots with this schema. `InvalidUsage` of kind
    `INVALID_COLUMN` shows the place in the text."""
    return _Parser(text, schema).whole()


class _Token(NamedTuple):
    kind: str
    """`number`, `text`, `name`, `end`; for a sign or a word, the sign or word itself."""
    text: str
    at: int


class _Operand(NamedTuple):
    """A column, as an expression of its type; or a value, which has no type yet."""

    what: Any
    type: pa.DataType | None
    at: int


class _Parser:
    """Recursive descent; each method takes the tokens of its rule."""

    def __init__(self, text: str, schema: Schema[Any, Any, Any]) -> None:
        self._text = text
        self._schema = schema
        self._tokens = self._split()
        self._depth = 0

    def whole(self) -> Any:
        condition = self._condition()
        if self._next.kind != "end":
            raise self._error(f"{self._next.text!r} is one thing too many")
        try:
            check_where(condition, self._schema)
        except InvalidUsage as error:
            raise self._error(str(error), 0) from None
        return condition

    # --- tokens ----------------------------------------------------------------------------------

    def _split(self) -> list[_Token]:
        """The tokens, the last one first."""
        tokens: list[_Token] = []
        at = 0
        while not tokens or tokens[-1].kind != "end":
            match = _TOKEN.match(self._text, at)
            if match is None or len(tokens) == TOKENS_MAX:
                at += len(self._text[at:]) - len(self._text[at:].lstrip())
                problem = "the condition is too long" if match else "this is no name, number, text or sign"
                raise self._error(problem, at)
            kind = str(match.lastgroup)
            text, at = match[kind], match.end()
            word = text.lower()
            token_kind = word if kind == "sign" or (kind == "name" and word in _WORDS) else kind
            tokens.append(_Token(token_kind, text, match.start(kind)))
        return tokens[::-1]

    @property
    def _next(self) -> _Token:
        return self._tokens[-1]

    def _take(self, *kinds: str) -> _Token | None:
        """The next token, if it is of one of these kinds."""
        return self._tokens.pop() if self._next.kind in kinds else None

    def _expect(self, kind: str) -> _Token:
        if (token := self._take(kind)) is None:
            raise self._error(f"expected {kind}")
        return token

    def _error(self, problem: str, at: int | None = None) -> InvalidUsage:
        at = self._next.at if at is None else at
        shown = f"{self._text[max(at - 40, 0) : at]} >>> {self._text[at : at + 40]}".strip()
        text = f"{problem}, at character {at + 1}: {shown}"
        return InvalidUsage(UsageKind.INVALID_COLUMN, text, where=self._text, at=at)

    # --- rules -----------------------------------------------------------------------------------

    def _condition(self) -> Any:
        condition = self._and()
        while self._take("or"):
            condition = condition | self._and()
        return condition

    def _and(self) -> Any:
        condition = self._not()
        while self._take("and"):
            condition = condition & self._not()
        return condition

    def _not(self) -> Any:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise self._error("the condition is nested too deep")
        try:
            if self._take("not"):
                return ~self._not()
            if self._take("("):
                condition = self._condition()
                self._expect(")")
                return condition
            return self._comparison()
        finally:
            self._depth -= 1

    def _comparison(self) -> Any:
        left = self._operand()
        if sign := self._take(*_SIGNS):
            right = self._operand()
            if left.type is None and right.type is None:
                raise self._error("two values are compared, and no column", left.at)
            return self._compared(sign.kind, left, right)
        if left.type is None:
            raise self._error("expected a comparison", left.at)
        if self._take("is"):
            negated = self._take("not")
            self._expect("null")
            return left.what.is_valid() if negated else left.what.is_null()
        negated = self._take("not")
        if self._take("in"):
            condition = self._in(left)
            return ~condition if negated else condition
        if negated:
            raise self._error("expected in")
        if not pa.types.is_boolean(left.type):
            raise self._error("expected a comparison")
        return left.what

    def _compared(self, sign: str, left: _Operand, right: _Operand) -> Any:
        if left.type is None:
            left, right, sign = right, left, _TURNED.get(sign, sign)
        if _is_exact(left.type) and (number := _number_of(right)) is not None:
            return _compared_exactly(sign, left.what, left.type, number)
        return _SIGNS[sign](left.what, self._value(right, left.type))

    def _in(self, left: _Operand) -> Any:
        self._expect("(")
        values = [self._literal()]
        while self._take(","):
            values.append(self._literal())
        self._expect(")")
        possible = [v for v in values if (number := _number_of(v)) is None or _holds(left.type, number)]
        condition = left.what.isin(pa.array([self._value(v, left.type).as_py() for v in possible], left.type))
        return condition | _null(left.what, left.type)  # Arrow says false for a null

    def _literal(self) -> _Operand:
        operand = self._operand()
        if operand.type is not None:
            raise self._error("expected a value, not a column", operand.at)
        return operand

    def _operand(self) -> _Operand:
        at = self._next.at
        if token := self._take("name"):
            return self._column(token)
        if token := self._take("text"):
            quote = token.text[0]
            return _Operand(token.text[1:-1].replace(quote * 2, quote), None, at)
        if token := self._take("true", "false"):
            return _Operand(token.kind == "true", None, at)
        minus = "-" if self._take("-") else ""
        if token := self._take("number"):
            return _Operand(self._number(minus + token.text, at), None, at)
        raise self._error("expected a column or a value")

    def _number(self, text: str, at: int) -> int | Decimal:
        try:
            return int(text) if text.lstrip("-").isdigit() else Decimal(text)
        except (ValueError, ArithmeticError):  # Python reads some thousand digits at most
            raise self._error("the number is too long", at) from None

    def _column(self, token: _Token) -> _Operand:
        name = token.text.replace("`", "")
        try:
            (path,) = resolve_columns([name], self._schema).values()
        except InvalidUsage as error:
            raise self._error(str(error).removeprefix(f"{error.kind}: "), token.at) from None
        of = self._schema.arrow_schema.field(path[0]).type
        for step in path[1:]:
            of = of.field(step).type
        return _Operand(pc.field(*path), of, token.at)

    def _value(self, operand: _Operand, of: pa.DataType | None) -> Any:
        """The operand; a value becomes a value of the type `of`."""
        if operand.type is not None:
            return operand.what
        try:
            return _scalar(operand.what, of)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            text = str(operand.what) if isinstance(operand.what, Decimal) else repr(operand.what)
            problem = f"{text} cannot be compared with a column of type {of}"
            raise self._error(problem, operand.at) from None


def _scalar(value: Any, of: pa.DataType | None) -> Any:
    if isinstance(value, bool) or pa.types.is_boolean(of):
        if not (isinstance(value, bool) and pa.types.is_boolean(of)):
            raise TypeError
        return pa.scalar(value)
    if isinstance(value, str) and pa.types.is_decimal(of):
        return pa.scalar(value).cast(of)
    if isinstance(value, str) is not (_is_of_text(of)):
        raise TypeError
    if isinstance(value, Decimal):
        return _floor(value, of) if _is_exact(of) else pa.scalar(float(value), of)
    if pa.types.is_decimal(of):
        return pa.scalar(str(value)).cast(of)
    return pa.scalar(value).cast(of) if isinstance(value, str) else pa.scalar(value, of)


# --- numbers with a fraction, beside columns that hold numbers exactly -----------------------------------


def _number_of(operand: _Operand) -> Decimal | None:
    """The number of an operand; `None` for any other operand."""
    what = operand.what
    is_number = operand.type is None and isinstance(what, int | Decimal) and not isinstance(what, bool)
    return Decimal(what) if is_number else None


def _null(column: Any, of: Any) -> Any:
    """Null where the column is null, else false."""
    differs = column != column
    return differs & ~column.is_nan() if pa.types.is_floating(of) else differs


def _is_exact(of: Any) -> bool:
    is_exact: bool = pa.types.is_integer(of) or pa.types.is_decimal(of)
    return is_exact


def _holds(of: Any, value: Decimal) -> bool:
    """Whether a column of that type can hold the number."""
    try:
        holds: bool = not _is_exact(of) or _floor(value, of).as_py() == value
    except (pa.ArrowException, OverflowError):
        return False
    return holds


def _floor(value: Decimal, of: Any) -> pa.Scalar:
    """The greatest number of that type up to the value. `OverflowError` or an Arrow error if there is
    none."""
    if value and value.adjusted() > DIGITS_MAX:
        raise OverflowError
    if value and value.adjusted() < -DIGITS_MAX:
        value = Decimal(1).scaleb(-DIGITS_MAX).copy_sign(value)
    scale = of.scale if pa.types.is_decimal(of) else 0
    floor = value.quantize(Decimal(1).scaleb(-scale), ROUND_FLOOR, Context(4 * DIGITS_MAX))
    return pa.scalar(int(floor) if pa.types.is_integer(of) else floor, of)


def _compared_exactly(sign: str, column: Any, of: Any, value: Decimal) -> Any:
    """The comparison with a number. If the column cannot hold the number, no value equals it, and the values
    below it are those up to its floor."""
    if _holds(of, value):
        return _SIGNS[sign](column, _floor(value, of))
    never, always = column != column, column == column  # null where the column is null
    if sign in EQUAL or sign in UNEQUAL:
        return never if sign in EQUAL else always
    try:
        below = _floor(value, of)
    except (pa.ArrowException, OverflowError):  # beyond all values
        return always if (sign in LESS) == (value > 0) else never
    return column <= below if sign in LESS else column > below


def _is_of_text(of: pa.DataType | None) -> bool:
    """Whether values of the type are written as texts: all but numbers."""
    return not (pa.types.is_integer(of) or pa.types.is_floating(of) or pa.types.is_decimal(of))
