"""The predicate of a waiver: comparisons of named facts of a case, joined by `and`, `or`, `not`.

It is read with Python's own parser and evaluated here, node by node: nothing in it can be called or looked up.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}


class ExpressionError(ValueError):
    """A predicate that cannot be read. The message is one sentence."""


class Predicate:
    """`text`, read once; called with the facts of a case.

    A name stands for the fact of that name; literals are numbers, strings, True, False, None and tuples of them. A
    comparison with a fact that is None is false, unless it asks for None (`window is None`).

    Raises:
        ExpressionError: something else stands there, or a name that is none of `names`.
    """

    def __init__(self, text: str, names: frozenset[str]) -> None:
        self.text = text
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
        except SyntaxError as error:
            raise ExpressionError(f"{text!r} is no expression: {error.msg}") from None
        for node in ast.walk(self._tree):
            if not isinstance(node, _KNOWN):
                raise ExpressionError(
                    f"{text!r} holds {ast.unparse(node)!r}; facts may only be compared and joined by and, or, not"
                )
            if isinstance(node, ast.Name) and node.id not in names:
                raise ExpressionError(
                    f"{text!r} names {node.id!r}; the facts of a case are {', '.join(sorted(names))}"
                )

    def __call__(self, facts: Mapping[str, Any]) -> bool:
        return bool(_value(self._tree, facts))


_KNOWN = (
    ast.BoolOp,
    ast.And,
    ast.Or,
    ast.UnaryOp,
    ast.Not,
    ast.USub,
    ast.Compare,
    ast.Name,
    ast.Load,
    ast.Constant,
    ast.Tuple,
    *_COMPARE,
)


def _value(node: ast.expr, facts: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return facts[node.id]
        case ast.Tuple():
            return tuple(_value(element, facts) for element in node.elts)
        case ast.UnaryOp():
            inner = _value(node.operand, facts)
            return not inner if isinstance(node.op, ast.Not) else -inner
        case ast.BoolOp():
            join = all if isinstance(node.op, ast.And) else any
            return join(_value(part, facts) for part in node.values)
        case ast.Compare():
            return _compare(node, facts)
    raise TypeError(f"{ast.dump(node)} was let through")


def _compare(node: ast.Compare, facts: Mapping[str, Any]) -> bool:
    left = _value(node.left, facts)
    for op, part in zip(node.ops, node.comparators, strict=True):
        right = _value(part, facts)
        if isinstance(op, (ast.Lt, ast.LtE, ast.Gt, ast.GtE)) and (left is None or right is None):
            return False
        if not _COMPARE[type(op)](left, right):
            return False
        left = right
    return True
