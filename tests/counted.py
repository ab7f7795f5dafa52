"""A budget that counts what is spent, by unit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from kvplan import Budget


class CountingBudget(Budget):
    """A budget that keeps the number of units that were spent, by the name of the unit."""

    def __init__(self, num_bytes: int = 1 << 40) -> None:
        super().__init__(num_bytes)
        self.numbers = Counter[str]()

    def spend(self, number: int, unit: str, bytes_each: int, action: str, **details: Any) -> None:
        super().spend(number, unit, bytes_each, action, **details)
        self.numbers[unit] += number


def numbers_of(action: Callable[[Budget], object]) -> Counter[str]:
    """Return how many units an action spends of the budget that it is given, by their name."""
    budget = CountingBudget()
    action(budget)
    return budget.numbers
