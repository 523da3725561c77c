"""Bugs made by hand, and the quick tests that must catch each of them.

    python tests/mutants.py              all of them, two at a time
    python tests/mutants.py NAME ...     some of them
    python tests/mutants.py --list       their names

Each bug replaces one text in one file of a copy of `src`. The tests then run on the copy. A bug is caught if a test
fails. A bug that no test catches is MISSED: write the test. `test_mutants.py` checks that the list fits the source.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "fedda"
AT_A_TIME = 2


@dataclass(frozen=True)
class Mutant:
    """`tests` is what pytest is given: a file of tests, and words that choose among them."""

    name: str
    file: str  # below src/fedda
    old: str
    new: str
    tests: str

    @property
    def words(self) -> list[str]:
        file, *chosen = shlex.split(self.tests)
        return [f"tests/{file}", *chosen]


MUTANTS = [
    # -- rules
    Mutant(
        "momentum-sign", "rules/estimators.py",
        "return a * g + (1 - a) * nu", "return a * g - (1 - a) * nu",
        "test_rules.py -k estimators_by_hand",
    ),
    Mutant(
        "mvr-two-batches", "rules/estimators.py",
        "g, g_prev = client.gradients(x, x_prev)", "(g,), (g_prev,) = client.gradients(x), client.gradients(x_prev)",
        "test_rules.py -k estimators_by_hand",
    ),
    Mutant(
        "units-are-norms", "rules/preconditioners.py",
        "sizes = (squares / count).sqrt()", "sizes = squares.sqrt()",
        "test_units.py -k size_of_a_parameter",
    ),
    Mutant(
        "units-multiply", "algorithms/fedda.py",
        "H: Tensor = h / self.units.spread(server.units)", "H: Tensor = h * self.units.spread(server.units)",
        "test_units.py -k three_rounds",
    ),
    Mutant(
        "rates-reach-zero", "rules/schedules.py",
        "return rate.clamp(min=self.start * SMALLEST_SHARE)", "return rate",
        "test_units.py -k divides",
    ),
    Mutant(
        "mvr-weight-not-clipped", "rules/estimators.py",
        "return a.clamp(max=1) if isinstance(a, Tensor) else min(1.0, a)", "return a",
        "test_identities.py -k e1_unit_weight",
    ),
    Mutant(
        "beta-swapped", "rules/preconditioners.py",
        "self.decay * mu + (1 - self.decay) * self.moment(s)", "(1 - self.decay) * mu + self.decay * self.moment(s)",
        "test_rules.py -k preconditioners_by_hand",
    ),
    Mutant(
        "bias-correction-one-round-late", "rules/preconditioners.py",
        "1 - self.decay**updates, 1.0)", "1 - self.decay ** (updates + 1), 1.0)",
        "test_training.py -k bias_correction_counts_rounds",
    ),
    Mutant(
        "rate-square-root", "rules/schedules.py",
        "return self.lr / (self.w + t) ** (1 / 3)", "return self.lr / (self.w + t) ** (1 / 2)",
        "test_rules.py -k schedules",
    ),
    Mutant(
        "yogi-sign", "rules/moments.py",
        "return v - (1 - beta2) * g**2 * (v - g**2).sign()", "return v + (1 - beta2) * g**2 * (v - g**2).sign()",
        "test_relations.py -k server_optimisers_by_hand",
    ),
    # -- algorithms
    Mutant(
        "rate-of-the-round", "algorithms/fedda.py",
        "eta = self.lr(t + i)", "eta = self.lr(t)",
        "test_identities.py -k two_rounds_by_hand",
    ),
    Mutant(
        "new-metric-for-the-old", "algorithms/fedda.py",
        "x = self.next_point(z, server.x, H, sum(etas), server.t)",
        "x = self.next_point(z, server.x, self.preconditioner.diagonal(self.preconditioner.update(server.mu, z / etas[-1]), "
        "server.t / self.steps), sum(etas), server.t)",
        "test_identities.py -k two_rounds_by_hand",
    ),
    Mutant(
        "prox-without-the-metric", "algorithms/fedda.py",
        "z / H, H / self.scale, total)", "z / H, 1 / self.scale, total)",
        "test_identities.py -k e6_one_local_step",
    ),
    Mutant(
        "fedavg-rate-of-the-round", "algorithms/fedavg.py",
        "- lr(t + i) * g)\n", "- lr(t) * g)\n",
        "test_relations.py -k 'three_rounds_by_hand and fedavg'",
    ),
    Mutant(
        "scaffold-control-sign", "algorithms/scaffold.py",
        "- lr(t + i) * (g - own + c)", "- lr(t + i) * (g + own - c)",
        "test_relations.py -k 'three_rounds_by_hand and scaffold'",
    ),
    Mutant(
        "scaffold-lost-share", "algorithms/scaffold.py",
        "c = c + cohort.share * dc", "c = c + dc",
        "test_training.py -k 'server_states_stay and scaffold'",
    ),
    Mutant(
        "feddyn-memory-sign", "algorithms/feddyn.py",
        'client.memory["g"] = own - self.alpha * (y - x)', 'client.memory["g"] = own + self.alpha * (y - x)',
        "test_relations.py -k feddyn",
    ),
    Mutant(
        "fedams-forgets-the-largest", "algorithms/fedopt.py",
        "first, second = m, v_max if self.largest else v", "first, second = m, v",
        "test_relations.py -k 'server_optimisers_by_hand and fedams'",
    ),
    Mutant(
        "mime-without-correction", "algorithms/mime.py",
        "g = g - g_x + c", "g = g + c",
        "test_relations.py -k mime",
    ),
    Mutant(
        "stale-own-point", "algorithms/old_point.py",
        '(client.memory["t"] == t) & (t > 0)', '(client.memory["t"] <= t) & (t > 0)',
        "test_old_point.py -k stem_by_hand",
    ),
    # -- engines and the state of a run
    Mutant(
        "infinity-passes", "engines/simulated.py",
        "finite &= reply.abs().amax(dim=-1) < math.inf", "finite &= reply.abs().amax(dim=-1) <= math.inf",
        "test_replies.py -k not_finite",
    ),
    Mutant(
        "memory-of-the-lost", "engines/simulated.py",
        "torch.where(finite, self.memory[name], kept[self._rows])", "self.memory[name]",
        "test_training.py -k a_failed_client_keeps",
    ),
    Mutant(
        "batch-drawn-twice", "engines/simulated.py",
        "self._next, self.batches_drawn = self._next + 1, self.batches_drawn + 1",
        "self.batches_drawn = self.batches_drawn + 1",
        "test_replies.py -k a_batch_of_its_own",
    ),
    Mutant(
        "key-of-the-place", "engines/participation.py",
        "self.participation.available(tau))\n        return ids, rng.fold(batch_key, ids)",
        "self.participation.available(tau))\n        return ids, rng.fold(batch_key, torch.arange(size))",
        "test_rng.py -k whatever_its_place",
    ),
    Mutant(
        "data-of-the-place", "engines/simulated.py",
        "everything(int(self.ids[at]))", "everything(at[-1])",
        "test_replies.py -k its_own_data",
    ),
    Mutant(
        "lost-weight", "engines/vectorised.py",
        "sums = [(weight * reply).sum(", "sums = [(1.0 * reply).sum(",
        "test_aggregation.py -k weights_count",
    ),
    Mutant(
        "cohort-with-replacement", "rng.py",
        "np.sort(np.argpartition(hashed.numpy(), r - 1, axis=-1)[..., :r], axis=-1)",
        "np.sort(integers(hashed[..., :r], n).numpy(), axis=-1)",
        "test_rng.py -k cohorts_are_without_replacement",
    ),
    Mutant(
        "resumed-round-plus-one", "run.py",
        'self.round = int(state["round"])', 'self.round = int(state["round"]) + 1',
        "test_engines.py -k 'same_seed_same_bits and fedavg'",
    ),
    # -- problems and data
    Mutant(
        "evaluation-denominator", "problems/evaluation.py",
        "share * weight.sum()", "share * weight.new_tensor(float(len(weight)))",
        "test_problems.py -k evaluation_means",
    ),
    Mutant(
        "evaluation-in-training-mode", "problems/neural.py",
        "        if not (self.batch_norms.layers or self.random):\n            return self.forward(point, inputs)\n",
        "        return self.forward(point[: self.d], inputs)\n",
        "test_batchnorm.py -k 'in_eval_mode_with_them'",
    ),
    Mutant(
        "dominant-class-off-by-one", "data/partition.py",
        "if client % len(classes) == c else other", "if client % len(classes) == c + 1 else other",
        "test_data.py -k dominant_class",
    ),
    Mutant(
        "validation-rounds-up", "data/holdout.py",
        "np.floor(share * sizes + 1e-9)", "np.ceil(share * sizes + 1e-9)",
        "test_validation.py -k each_client_gives",
    ),
    # -- aggregation and privacy
    Mutant(
        "no-clip", "aggregation/clip.py",
        "return torch.where(largest * length <= most, v, unit * scale)", "return v",
        "test_aggregation.py -k a_liar_s_huge_reply",
    ),
    Mutant(
        "noise-reused", "aggregation/cohort.py",
        "rng.fold(self.key, self.exchanges), self.new_key", "self.key, self.new_key",
        "test_replies.py -k new_in_every_exchange",
    ),
    Mutant(
        "noise-divides-by-replies", "aggregation/noise.py",
        "means.append((total / exchange.size)", "means.append((total / (weights > 0).sum(dim=-2, keepdim=True))",
        "test_aggregation.py -k noise_divides",
    ),
    Mutant(
        "residual-forgets", "aggregation/compression.py",
        "client.memory[name] = whole - sent", "client.memory[name] = reply - sent",
        "test_aggregation.py -k compression_s_residuals",
    ),
    # -- deploy
    Mutant(
        "weights-can-be-bought", "deploy/server.py",
        "self.sizes.clamp(max=self.plan.max_samples)", "self.sizes",
        "test_deploy.py -k cannot_be_bought",
    ),
    Mutant(
        "text-of-an-exception-leaves", "deploy/client.py",
        "raise SiteError(type(why).__name__)", "raise SiteError(str(why))",
        "test_deploy.py -k type_of_an_exception",
    ),
    Mutant(
        "open-doors-are-fine", "deploy/check.py",
        "wrong = not door.for_nodes or context is None", "wrong = False",
        "test_doors.py -k plain_superlink",
    ),
    Mutant(
        "ledger-not-written", "deploy/checkpoint.py",
        'write_whole(self.charges, (json.dumps(asdict(ledger)) + "\\n").encode(), PRIVATE)\n        return', "return",
        "test_privacy.py -k a_lost_attempt",
    ),
    Mutant(
        "secret-in-the-state", "deploy/checkpoint.py",
        'metadata={"facts": json.dumps(facts)}', 'metadata={"facts": json.dumps(facts | {"key": self.secret.hex()})}',
        "test_privacy.py -k no_secret_lies",
    ),
    Mutant(
        "wire-takes-any-number", "deploy/federation.py",
        "if not all(map(math.isfinite, sizes)):", "if not sizes:",
        "test_deploy.py -k 'faulty_client and nan'",
    ),
    Mutant(
        "metrics-without-bounds", "deploy/reported.py",
        "if not low <= value <= high:", "if low > high:",
        "test_deploy_options.py -k are_not_possible",
    ),
    Mutant(
        "statistics-of-the-last-site", "deploy/federation.py",
        "return total.value() / relayed.total_weight(weights, used), used", "return mean, used",
        "test_deploy_options.py -k 'batch_norm_as_simulated and fedavg'",
    ),
    Mutant(
        "every-site-is-the-first-client", "deploy/client.py",
        "own.first_client = max(0, number(context))", "own.first_client = 0",
        "test_deploy_options.py -k 'dropout_as_simulated and mime'",
    ),
    Mutant(
        "a-key-for-any-number", "deploy/participants.py",
        "if numbers[key] != claimed:", "if claimed < 0:",
        "test_deploy.py -k key_counts",
    ),
    Mutant(
        "rows-stay-when-a-site-leaves", "deploy/server.py",
        'kept = [k for k, name in enumerate(facts["names"]) if name not in plan.left_out]',
        'kept = list(range(len(facts["names"])))',
        "test_deploy.py -k gone_for_good",
    ),
    Mutant(
        "the-page-runs-scripts", "deploy/status.py",
        'return f\'<td class="{kind}">{escape(value)}</td>\'', 'return f\'<td class="{kind}">{value}</td>\'',
        "test_status.py -k escapes",
    ),
    # -- the run folder
    Mutant(
        "stale-checkpoint", "runs/folder.py",
        'if zlib.crc32(content) != facts["crc32"]:', "if not content:",
        "test_resume.py -k damaged_checkpoint",
    ),
    Mutant(
        "unsynced-file", "files.py",
        "file.flush()\n                os.fsync(handle)", "file.flush()",
        "test_files.py",
    ),
    # -- report and claims
    Mutant(
        "worst-marked-best", "report/ranking.py",
        'sign = 1 if metric.better == "lower" else -1', 'sign = -1 if metric.better == "lower" else 1',
        "test_report.py -k chance_does_not_explain",
    ),
    Mutant(
        "claim-direction", "claims/compare.py",
        'LOWER = SPARSE | {"train_loss", "test_loss"}', 'LOWER = SPARSE | {"train_loss"}',
        "test_claims.py -k in_the_paper_s_world",
    ),
    Mutant(
        "claim-two-standard-errors", "claims/values.py",
        "return two_sided_p(self.mean / self.se, self.seeds - 1)", "return two_sided_p(self.mean / self.se, 60)",
        "test_claims.py -k not_two_standard_errors",
    ),
    Mutant(
        "claim-no-correction", "claims/compare.py",
        "min(1.0, (len(order) - rank) * p)", "min(1.0, p)",
        "test_claims.py -k more_comparisons_needs_more",
    ),
    Mutant(
        "claim-loss-forgiven", "claims/compare.py",
        "    if NOT_SUPPORTED in verdicts:\n        return NOT_SUPPORTED\n    return SUPPORTED",
        "    if verdicts <= {NOT_SUPPORTED}:\n        return NOT_SUPPORTED\n    return SUPPORTED",
        "test_claims.py -k one_case_refutes_every",
    ),
    Mutant(
        "claim-unpaired", "claims/values.py",
        "v - other.by_seed[s] for s, v in self.by_seed.items() if s in other.by_seed",
        "v - other.mean for s, v in self.by_seed.items() if s in other.by_seed",
        "test_claims.py -k taken_seed_by_seed",
    ),
    # -- secure aggregation
    Mutant(
        "masks-do-not-cancel", "deploy/masking.py",
        "_add_mask(total, key, terms.bits, own < other)", "_add_mask(total, key, terms.bits, True)",
        "test_secure.py -k one_mean_is_within",
    ),
    Mutant(
        "both-kinds-of-share-revealed", "deploy/masking.py",
        "[share for other, share in pairs if other not in uploaded]", "[share for other, share in pairs]",
        "test_secure.py -k never_reveals_both",
    ),
    Mutant(
        "mask-used-twice", "deploy/secure_client.py",
        "if terms.number <= last:", "if terms.number < last:",
        "test_secure.py -k refuses_what_a_bad_server",
    ),
    Mutant(
        "mask-of-32-bits", "aggregation/gaussian.py",
        "np.frombuffer(chacha20(key).update(", "np.frombuffer(chacha20(key[:4] * 8).update(",
        "test_secure.py -k depends_on_all_bits",
    ),
    Mutant(
        "a-minority-is-enough", "deploy/masking.py",
        "if len(uploaded) < terms.needed:", "if len(uploaded) < 1:",
        "test_secure.py -k refuse_sums_of_too_few",
    ),
    # -- rounds compiled for a CPU, and gradients of stacks
    Mutant(
        "reads-before-it-is-written", "engines/programs.py",
        "first = max(first, self.written.get(a.base, -1) + 1)", "first = max(first, self.written.get(a.base, -1))",
        "test_programs.py -k memory",
    ),
    Mutant(
        "program-of-user-code", "run.py",
        "return self.problem.calls_user_code or has_user_code(rules)", "return has_user_code(rules)",
        "test_programs.py -k code_of_the_user",
    ),
    Mutant(
        "index-out-of-range", "engines/loops.py",
        "g{k} = 0, outside = 1;", "g{k} = 0;",
        "test_programs.py -k out_of_range",
    ),
    Mutant(
        "multiply-add", "engines/loops.py",
        '"-ffp-contract=off"', '"-ffp-contract=fast"',
        "test_programs.py -k products_are_rounded",
    ),
    Mutant(
        "factors-not-exchanged", "problems/gradients/vmap.py",
        "node.args = _transposed(b), _transposed(a)", "node.args = _transposed(a), _transposed(b)",
        "test_models.py -k stack_has_the_gradients",
    ),
    Mutant(
        "weights-of-the-first-model", "problems/gradients/convolution.py",
        "y = implicit_gemm.forward(x, w, b,", "y = implicit_gemm.forward(x, w[:1].expand(w.shape), b,",
        "test_layers.py -k equals_autograd",
    ),
]  # fmt: skip


def mutated(mutant: Mutant, place: Path) -> Path:
    """A copy of the source with the bug in it."""
    shutil.copytree(SOURCE, place / "fedda", ignore=shutil.ignore_patterns("__pycache__"))
    file = place / "fedda" / mutant.file
    file.write_text(file.read_text().replace(mutant.old, mutant.new))
    return place


def tried(mutant: Mutant) -> tuple[bool, str]:
    """Whether the tests caught the bug, and what pytest said."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as place:
        path = os.pathsep.join([str(mutated(mutant, Path(place))), str(ROOT / "tests")])
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        words = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--basetemp", str(Path(place) / "tmp")]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *words, *mutant.words], cwd=ROOT, env=environment,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    # 1 is a failed test. Anything else (nothing collected, a file that cannot be imported) catches nothing.
    return done.returncode == 1, done.stdout + done.stderr


def main(names: list[str]) -> int:
    if names == ["--list"]:
        print("\n".join(mutant.name for mutant in MUTANTS))
        return 0
    unknown = set(names) - {mutant.name for mutant in MUTANTS}
    if unknown:
        print(f"no mutant is called {', '.join(sorted(unknown))}; --list shows them")
        return 2
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    missed, began = [], time.monotonic()
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        for mutant, (caught, said) in zip(chosen, pool.map(tried, chosen), strict=True):
            print(f"{'caught' if caught else 'MISSED'}  {mutant.name}", flush=True)
            if not caught:
                missed.append(mutant.name)
                print("        " + "\n        ".join(said.splitlines()[-5:]))
    print(f"{len(chosen) - len(missed)} of {len(chosen)} caught in {time.monotonic() - began:.0f} s")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
