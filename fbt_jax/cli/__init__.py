"""The `fbt` command: one verb a module, each with `HELP`, `add_arguments(parser)` and `run(args, rest) -> exit status`.

Exit status: 0 the work is done, 1 it failed, 2 the user's mistake (one line on stderr), 143 or 130 stopped by a
signal after saving. Verbs import what they need when they run, so that `fbt --help` comes back at once.
"""

import argparse
import importlib
import sys
from typing import NoReturn

from fbt_jax.config import UserError

VERBS = ('train', 'evaluate')


class _Parser(argparse.ArgumentParser):
    """Mistakes are one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f'{self.prog}: {message}\n')


def main(argv: list[str] | None = None) -> int:
    parser = _Parser(prog='fbt', description='Pretrain Full-bandwidth Transformers.', allow_abbrev=False)
    verbs = parser.add_subparsers(dest='verb', required=True, metavar='VERB', parser_class=_Parser)
    modules = {name: importlib.import_module(f'fbt_jax.cli.{name}') for name in VERBS}
    for name, module in modules.items():
        verb = verbs.add_parser(
            name,
            help=module.HELP,
            description=module.HELP,
            epilog=module.__doc__,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(verb)
    args, rest = parser.parse_known_args(argv)
    try:
        return modules[args.verb].run(args, rest)
    except UserError as error:
        status, what = 2, str(error)
    except (RuntimeError, OSError) as error:
        status, what = 1, str(error)
    except KeyboardInterrupt:
        status, what = 130, 'interrupted'
    print(f'fbt {args.verb}: {what}', file=sys.stderr)
    return status


def config_overrides(rest: list[str]) -> dict[str, str]:
    """{dotted key: text} from `--config.KEY=VALUE` and `--config.KEY VALUE`.

    Raises:
      UserError: another argument, or a key without a value.
    """
    overrides: dict[str, str] = {}
    arguments = iter(rest)
    for argument in arguments:
        if not argument.startswith('--config.'):
            raise UserError(f'unknown argument {argument}; see --help')
        key, equals, value = argument.removeprefix('--config.').partition('=')
        if not equals:
            value = next(arguments, '')
            if not value or value.startswith('--'):
                raise UserError(f'--config.{key} needs a value: --config.{key}=VALUE')
        overrides[key] = value
    return overrides


def no_more_arguments(rest: list[str]) -> None:
    if rest:
        raise UserError(f'unknown argument {rest[0]}; see --help')
