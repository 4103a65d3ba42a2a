"""The command line: ``torchrec-neuroshard`` or ``python -m torchrec_neuroshard``.

Exit status: 0 done, 1 the installation is broken, 2 bad input (the message names file, field and remedy), 3 no
feasible plan, 141 the output was not read to its end.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Sequence

from torchrec_neuroshard._versions import StackError, require_stack
from torchrec_neuroshard.cli.errors import CliError
from torchrec_neuroshard.cli.parser import build_parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: what follows the program's name; None takes ``sys.argv``.

    Returns:
        The exit status.

    Raises:
        SystemExit: the arguments cannot be parsed (status 2), or ask for help (status 0).
    """
    options = build_parser().parse_args(arguments)
    try:
        if options.command != "doctor":  # which reports what is wrong instead
            require_stack()
        # Commands import torch and TorchRec, so that `--help` and bad arguments answer at once without.
        command = importlib.import_module(f"torchrec_neuroshard.cli.{options.command}")
        status = int(command.run(options))
        sys.stdout.flush()  # while a reader that has gone away, or a full disk, can still be told apart
        return status
    except BrokenPipeError:  # `| head`: nobody reads on, which is no error of ours
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except CliError as error:
        print(f"torchrec-neuroshard {options.command}: error: {error}", file=sys.stderr)
        return 2
    except StackError as error:
        print(f"torchrec-neuroshard {options.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"torchrec-neuroshard {options.command}: interrupted", file=sys.stderr)
        return 130
