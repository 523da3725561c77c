"""`fedda deploy`: a new federation over Flower, its keys, its doors, and a run of it in one process."""

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
    """Real federations over Flower: write an app, make its keys, check its doors, run it in one process."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@contextmanager
def installed() -> Iterator[None]:
    """A missing package ends in one line."""
    try:
        yield
    except ImportError as why:
        raise ValueError(str(why)) from why


@deploy.command(epilog="Example: fedda deploy init hospitals --clients 4")
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder; the app has its name.")],
    clients: Annotated[int, typer.Option(help="Number of sites.")] = 3,
) -> None:
    """Write a Flower app: a model, data to fill in, settings, start scripts, a README.

    It runs unchanged on scikit-learn's digits.
    """
    with installed():
        from ..deploy.init import init as write
    files = write(folder, clients)
    print(f"{len(files)} files in {folder}: fill in load_data of {files[4]}")
    print(f"in one process: fedda deploy simulate {folder}; as a federation on this machine: {folder}/try.sh")


@deploy.command(epilog="Example: fedda deploy keys hospitals/keys --hosts link.example.org --nodes 4")
def keys(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the keys go.")],
    hosts: Annotated[
        str, typer.Option(help="The server's names and addresses, for its certificate; with commas.")
    ] = "",
    nodes: Annotated[int, typer.Option(help="Number of node keys to make.")] = 0,
    only: Annotated[int | None, typer.Option(help="Make only the key of this node, at its site.")] = None,
    days: Annotated[int, typer.Option(help="Validity of the server's certificate.")] = 365,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing keys; a CA is kept.")] = False,
) -> None:
    """Make the CA, the server's certificate and the nodes' keys.

    Private files (no suffix, or .key) must stay secret; ca.crt and *.pub may be given away.
    """
    with installed():
        from ..deploy.keys import make_keys
    if only is not None and nodes:
        raise ValueError("--nodes makes several keys and --only makes one: give one of them")
    if nodes < 0:
        raise ValueError(f"--nodes must be a whole number >= 0, got {nodes}")
    names = [host.strip() for host in hosts.split(",")] if hosts else []
    files = make_keys(folder, names, list(range(nodes)) if only is None else [only], days, overwrite)
    print(f"{folder}: {', '.join(path.name for path in files)}")
    if (folder / "ca.key").exists():
        print(f"move {folder}/ca.key to a place offline: its holder can pose as the server to every site")


@deploy.command(epilog="Example: fedda deploy simulate hospitals --run-config 'rounds=2'")
def simulate(
    folder: Annotated[Path, typer.Argument(metavar="APPDIR", help="A Flower app that uses fedda.deploy.")],
    run_config: Annotated[list[str] | None, typer.Option("--run-config", "-c", help="As in 'rounds=2 seed=1'.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the results; ./simulation by default.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run in it.")] = False,
) -> None:
    """Run an app's server and clients in this one process: no network, no Ray, breakpoints work.

    The first error on a client ends the run, with the place of the error.
    """
    with installed():
        from ..deploy.simulate import simulate as run
    print(f"results: {run(folder, run_config or [], out, overwrite)}")


@deploy.command(epilog="Example: fedda deploy check link.example.org:9443 --root-certificates keys/ca.crt")
def check(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where the sites reach the server.")],
    root_certificates: Annotated[
        Path | None, typer.Option("--root-certificates", help="ca.crt, to check the server's certificate.")
    ] = None,
) -> None:
    """Try from outside which of Flower's calls are open: run it at a site, not on the server.

    Only the nodes' calls should be. Exit status 1 means that something is not as it should be.
    """
    with installed():
        from ..deploy.check import try_doors
    wrong = 0
    for finding in try_doors(address, root_certificates):
        print(finding.text, flush=True)
        wrong += finding.wrong
    if wrong:
        raise typer.Exit(1)


@deploy.command(epilog="Example: fedda deploy export federation --out model.safetensors")
def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run's results.")],
    out: Annotated[Path, typer.Option(help=".safetensors, or .pt for torch.load.")] = Path("model.safetensors"),
) -> None:
    """Write the trained model into a file that can be published.

    The folder itself holds a secret and data about single sites.
    """
    with installed():
        from ..deploy.checkpoint import STATE, read_state
        from ..deploy.results import export as write
    names = write(folder, out)
    spent = read_state(folder / STATE)[1].get("privacy", {})
    epsilon = f"epsilon {spent['epsilon_outside']:.3g} against the outside" if "epsilon_outside" in spent else ""
    print(f"{out}: {len(names)} parameters: {', '.join(names)}")
    print(f"privacy: {epsilon or 'no noise, no guarantee'}{', ' + spent['privacy'] if epsilon else ''}")
