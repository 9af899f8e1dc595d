"""How a user's mistake is told. Imports nothing."""


class UserError(ValueError):
    """A user's mistake, told in one line with what would be right. Commands exit with status 2."""


def require(ok: bool, key: str, value: object, allowed: str) -> None:
    """UserError that names the key, its value and what is allowed, unless `ok`."""
    if not ok:
        raise UserError(f'{key} = {value!r}: {allowed}')
