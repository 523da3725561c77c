"""`fedda deploy`: a new federation over Flower, its keys, and a run of it in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from .app import app

deploy = typer.Typer(rich_markup_mode="rich")
app.add_typer(deploy, name="deploy")


@deploy.callback(invoke_without_command=True, epilog="Example: fedda deploy init hospitals --clients 4")
def deploy_(context: typer.Context) -> None:
    """Real federations over Flower: write an app, make its keys, try it in one process."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@contextmanager
def installed() -> Iterator[None]:
    """An absent package is a matter of one line."""
    try:
        yield
    except ImportError as why:
        raise ValueError(str(why)) from why


@deploy.command(epilog="Example: fedda deploy init hospitals --clients 4")
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder; its name is the app's.")],
    clients: Annotated[int, typer.Option(help="Sites of the federation.")] = 3,
) -> None:
    """Write a Flower app: a model, data to fill in, settings, scripts that start everything, a README.

    It runs as it is, on scikit-learn's digits.
    """
    with installed():
        from ..deploy.init import init as write
    made = write(folder, clients)
    print(f"{len(made)} files in {folder}: fill in load_data of {made[4]}")
    print(f"in one process: fedda deploy simulate {folder}; as a federation on this machine: {folder}/try.sh")


@deploy.command(epilog="Example: fedda deploy keys hospitals/keys --hosts link.example.org --nodes 4")
def keys(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the keys go.")],
    hosts: Annotated[
        str, typer.Option(help="Names and addresses of the server, with commas: its certificate, and a CA if absent.")
    ] = "",
    nodes: Annotated[int, typer.Option(help="Node keys to make, numbered from 0.")] = 0,
    only: Annotated[int | None, typer.Option(help="The key of this node alone, as a site makes its own.")] = None,
    days: Annotated[int, typer.Option(help="How long the server's certificate is valid.")] = 365,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there; a CA is kept.")] = False,
) -> None:
    """Make the CA, the server's certificate and the nodes' keys.

    Private files (no ending, or .key) are for their owner alone; ca.crt and *.pub may be given away.
    """
    with installed():
        from ..deploy.keys import make_keys
    if only is not None and nodes:
        raise ValueError("--nodes makes several keys and --only makes one: give one of them")
    if nodes < 0:
        raise ValueError(f"--nodes must be a whole number >= 0, got {nodes}")
    names = [host.strip() for host in hosts.split(",")] if hosts else []
    made = make_keys(folder, names, list(range(nodes)) if only is None else [only], days, overwrite)
    print(f"{folder}: {', '.join(path.name for path in made)}")


@deploy.command(epilog="Example: fedda deploy simulate hospitals --run-config 'rounds=2'")
def simulate(
    folder: Annotated[Path, typer.Argument(metavar="APPDIR", help="A Flower app that was made with fedda.deploy.")],
    run_config: Annotated[
        list[str] | None,
        typer.Option("--run-config", "-c", help="Words of the app's configuration: 'rounds=2 seed=1'."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where the results go, ./simulation if left out.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run there.")] = False,
) -> None:
    """Run an app's server and clients in this one process: no network, no Ray, breakpoints work.

    The first mistake on a client ends it, with the place of the mistake.
    """
    with installed():
        from ..deploy.simulate import simulate as run
    print(f"results: {run(folder, run_config or [], out, overwrite)}")


@deploy.command(epilog="Example: fedda deploy export federation --out model.safetensors")
def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run's results.")],
    out: Annotated[Path, typer.Option(help="The file: .safetensors, or .pt for torch.load.")] = Path(
        "model.safetensors"
    ),
) -> None:
    """Write the trained model into a file that can be published.

    The folder itself holds a secret, and data about single sites.
    """
    with installed():
        from ..deploy.trained import export as write
        from ..deploy.trained import facts_of
    names = write(folder, out)
    spent = facts_of(folder).get("privacy", {})
    epsilon = f"epsilon {spent['epsilon_outside']:.3g} against the outside" if "epsilon_outside" in spent else ""
    print(f"{out}: {len(names)} parameters: {', '.join(names)}")
    print(f"privacy: {epsilon or 'no noise, no guarantee'}{', ' + spent['privacy'] if epsilon else ''}")
