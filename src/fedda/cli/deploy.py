"""`fedda deploy`: a new federation over Flower, its keys, its doors, how a run stands, and a run in one process."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from .app import app
from .commands import FEDERATIONS, Commands

deploy = Commands(rich_markup_mode="rich")
app.add_typer(deploy, name="deploy", rich_help_panel=FEDERATIONS)


@deploy.callback(invoke_without_command=True, epilog="Example: fedda deploy init hospitals --clients 4")
def deploy_(context: typer.Context) -> None:
    """Real federations over Flower: write an app, make keys, check doors, watch a run, run it in one process."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@deploy.command(epilog="Example: fedda deploy init hospitals --clients 4")
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder; the app has its name.")],
    clients: Annotated[int, typer.Option(help="Number of sites.")] = 3,
) -> None:
    """Write a Flower app: a model, data to fill in, settings, start scripts, a README.

    It runs unchanged on fedda's digits.
    """
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
    from ..deploy.simulate import simulate as run

    print(f"results: {run(folder, run_config or [], out, overwrite)}")


@deploy.command(epilog="Example: fedda deploy check link.example.org:9443 --root-certificates keys/ca.crt")
def check(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where the sites reach the server.")],
    root_certificates: Annotated[
        Path | None, typer.Option("--root-certificates", help="ca.crt, to check the server's certificate.")
    ] = None,
    clock: Annotated[
        bool, typer.Option("--clock", help="Compare only the clocks of this machine and the server.")
    ] = False,
) -> None:
    """Try from outside which of Flower's calls are open, and compare clocks: run it at a site, not on the server.

    Only the nodes' calls should be open. Exit status 1 means that something is not as it should be.
    """
    from ..deploy.check import try_doors

    wrong = 0
    for finding in try_doors(address, root_certificates, clock):
        print(finding.text, flush=True)
        wrong += finding.wrong
    if wrong:
        raise typer.Exit(1)


@deploy.command(epilog="Example: fedda deploy status federation --serve")
def status(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run's results.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    serve: Annotated[bool, typer.Option("--serve", help="Show a live page, on this machine alone.")] = False,
    port: Annotated[int, typer.Option(help="Port of the page on 127.0.0.1; 0 takes a free one.")] = 9480,
) -> None:
    """Show how a run stands: sites, replies, faults, seconds, epsilon.

    Exit status 1 means that the run has failed, or that its server has died.
    """
    from ..deploy.status import BAD, live_page, read_status

    if serve:
        if as_json:
            raise ValueError("--json prints once and --serve shows a page: give one of them")
        if not 0 <= port <= 65535:
            raise ValueError(f"--port must be 0 to 65535, got {port}")
        server = live_page(folder, port)
        print(f"http://127.0.0.1:{server.server_port}/ shows {folder}; Ctrl-C ends it", flush=True)
        with server, suppress(KeyboardInterrupt):
            server.serve_forever()
        return
    status = read_status(folder)
    if as_json:
        print(json.dumps(status, indent=1))
    else:
        show_status(status)
    if status["status"] in BAD:
        raise typer.Exit(1)


def show_status(status: dict[str, Any]) -> None:
    """The status as tables in the terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ..deploy import status as shown

    console = Console(highlight=False)
    console.print(Text(f"{status['folder']}: {shown.headline(status)}", style="bold"), soft_wrap=True)
    console.print(Text("; ".join(f"{name}: {value}" for name, value in shown.facts(status))), soft_wrap=True)
    for line in shown.notes(status):
        console.print(Text(line), soft_wrap=True)
    seconds = [(name, shown.in_seconds(last), f"{total:.1f}") for name, last, total in shown.second_rows(status)]
    tables = (
        (shown.SITES, list(shown.site_rows(status)), (2, 3, 4)),
        (shown.FAULTS, list(shown.fault_rows(status)), (2,)),
        (shown.SECONDS, seconds, (1, 2)),
    )
    for names, rows, numbers in tables:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for i, name in enumerate(names):
            table.add_column(name, justify="right" if i in numbers else "left", overflow="fold")
        for row in rows:
            table.add_row(*(Text(value) for value in row))
        if rows:
            console.print(table)


@deploy.command(epilog="Example: fedda deploy export federation --out model.safetensors")
def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run's results.")],
    out: Annotated[Path, typer.Option(help=".safetensors, or .pt for torch.load.")] = Path("model.safetensors"),
) -> None:
    """Write the trained model into a file that can be published.

    The folder itself holds a secret and data about single sites.
    """
    from ..deploy.checkpoint import STATE, read_state
    from ..deploy.results import export as write

    names = write(folder, out)
    spent = read_state(folder / STATE)[1].get("privacy", {})
    epsilon = f"epsilon {spent['epsilon_outside']:.3g} against the outside" if "epsilon_outside" in spent else ""
    print(f"{out}: {len(names)} parameters: {', '.join(names)}")
    print(f"privacy: {epsilon or 'no noise, no guarantee'}{', ' + spent['privacy'] if epsilon else ''}")
