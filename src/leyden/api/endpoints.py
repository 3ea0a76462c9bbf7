"""The control API: every endpoint that has typed requests and replies. `api/endpoint.py` says how a declaration reads.

Every path that concerns a run contains its id, against which keys are checked.
"""
# mypy: disable-error-code="empty-body"

from collections.abc import Sequence

from leyden.api import views, wire
from leyden.api.endpoint import Permission, endpoint
from leyden.api.fleet import Fleet
from leyden.episodes import Episode
from leyden.records import Call, Group, Metric, Reward, Run, StepCredits, Version, Worker

_RUN = "/api/runs/{run}"
_GROUP = _RUN + "/groups/{group}"
_ROLLOUT = _RUN + "/rollouts/{rollout}"
_ATTEMPT = _RUN + "/attempts/{attempt}"


class ControlApi:
    """The endpoints by name."""

    @endpoint("GET", "/healthz", None)
    def health(self) -> dict[str, str]:
        """Answer that the server is up."""

    # Runs

    @endpoint("GET", "/api/runs", Permission.READ)
    def list_runs(self) -> list[wire.RunSummary]:
        """List the runs that the key may read, oldest first."""

    @endpoint("POST", "/api/runs", Permission.MANAGE)
    def create_run(self, spec: wire.RunSpec) -> Run:
        """Create a run; repeating the request changes nothing."""

    @endpoint("GET", _RUN, Permission.READ)
    def get_run(self, run: str) -> Run:
        """Return a run with its configuration."""

    @endpoint("GET", _RUN + "/exists", Permission.WORK)
    def run_exists(self, run: str) -> wire.Existence:
        """Say whether there is such a run: a worker may be started before its run."""

    @endpoint("DELETE", _RUN, Permission.DELETE)
    def delete_run(self, run: str) -> None:
        """Delete a run and free its space."""

    @endpoint("GET", _RUN + "/summary", Permission.READ)
    def summarise_run(self, run: str) -> wire.RunSummary:
        """Count what a run holds."""

    @endpoint("POST", _RUN + "/end", Permission.MANAGE)
    def end_run(self, run: str) -> None:
        """Refuse leases of a run from now on, until the server is started again: its workers end."""

    @endpoint("GET", _RUN + "/events", Permission.READ, waits=True)
    def follow_events(self, run: str, cursor: wire.EventCursor) -> wire.EventLog:
        """Read a run's events after a cursor; wait if there are none."""

    @endpoint("GET", _RUN + "/metrics", Permission.READ)
    def list_metrics(self, run: str, cursor: wire.Cursor) -> wire.Metrics:
        """Read a run's metrics after a cursor."""

    @endpoint("POST", _RUN + "/metrics", Permission.MANAGE)
    def record_metrics(self, run: str, new: Sequence[Metric]) -> wire.Recorded:
        """Record metrics of a run."""

    @endpoint("POST", _RUN + "/credits", Permission.MANAGE)
    def record_credits(self, run: str, new: StepCredits) -> wire.Recorded:
        """Record what a training step computed for calls; repeating it overwrites."""

    @endpoint("GET", _RUN + "/versions", Permission.READ)
    def list_versions(self, run: str) -> list[Version]:
        """Return the newest version of each policy."""

    @endpoint("POST", _RUN + "/versions", Permission.MANAGE)
    def publish_version(self, run: str, version: Version) -> wire.Recorded:
        """Record that a version of a policy is served from now on; calls that were held for it resume."""

    @endpoint("GET", _RUN + "/evaluation", Permission.READ)
    def read_evaluation(self, run: str, query: views.EvaluationQuery) -> views.Evaluation:
        """Return the rewards of an evaluation by task."""

    @endpoint("GET", _RUN + "/call_times", Permission.READ)
    def get_call_times(self, run: str) -> wire.CallTimes:
        """Return how long the model calls of a run have taken in this server, and at what."""

    @endpoint("POST", _RUN + "/policies/{policy}/hold", Permission.MANAGE)
    def hold_calls(self, run: str, policy: str) -> wire.HoldReply:
        """Start no model call of a policy until its next version is published; return how many calls wait."""

    # Groups

    @endpoint("POST", _RUN + "/groups", Permission.MANAGE)
    def enqueue(self, run: str, spec: wire.GroupSpec) -> Group:
        """Queue a group of rollouts; repeating the request only queues what was parked."""

    @endpoint("GET", _GROUP, Permission.READ)
    def get_group(self, run: str, group: str) -> Group:
        """Return a group."""

    @endpoint("GET", _GROUP + "/episodes", Permission.READ_EPISODES)
    def group_episodes(self, run: str, group: str) -> list[Episode]:
        """Return the episode of the latest attempt of each rollout of a group."""

    @endpoint("POST", _GROUP + "/cancel", Permission.MANAGE)
    def cancel_group(self, run: str, group: str) -> wire.CancelReply:
        """Cancel the unfinished rollouts of a group."""

    @endpoint("POST", "/api/scorings", Permission.WORK, waits=True)
    def lease_scoring(self, request: wire.ScoringRequest) -> list[wire.GroupScoring]:
        """Lease a group for scoring; wait if there is none."""

    @endpoint("POST", _GROUP + "/beat", Permission.WORK)
    def heartbeat_scoring(self, run: str, group: str, lease: wire.ScoringHeartbeat) -> wire.Counted:
        """Renew the lease of a group scoring."""

    @endpoint("POST", _GROUP + "/scores", Permission.WORK)
    def score_group(self, run: str, group: str, scores: wire.Scores) -> wire.Counted:
        """Record the scores of a group, which finishes it. A late report is logged and changes nothing."""

    # Rollouts and attempts

    @endpoint("GET", _RUN + "/rollouts", Permission.READ)
    def list_rollouts(self, run: str, page: wire.RolloutPage) -> list[wire.ListedRollout]:
        """List rollouts in the order in which they were queued."""

    @endpoint("GET", _ROLLOUT, Permission.READ)
    def get_rollout(self, run: str, rollout: str) -> wire.RolloutDetail:
        """Return a rollout with its task and attempts."""

    @endpoint("GET", _ROLLOUT + "/credits", Permission.READ)
    def rollout_credits(self, run: str, rollout: str) -> list[StepCredits]:
        """Return value, advantage, weight and trained tokens of each call of a rollout, or why it was left out."""

    @endpoint("POST", _ROLLOUT + "/cancel", Permission.MANAGE)
    def cancel_rollout(self, run: str, rollout: str) -> wire.CancelReply:
        """Cancel a rollout."""

    @endpoint("GET", _ATTEMPT, Permission.READ_EPISODES)
    def get_episode(self, run: str, attempt: str) -> Episode:
        """Return the episode of an attempt."""

    @endpoint("POST", _ATTEMPT + "/calls", Permission.RECORD)
    def record_calls(self, run: str, attempt: str, new: Sequence[Call]) -> wire.Recorded:
        """Record model calls of an active attempt."""

    @endpoint("POST", _ATTEMPT + "/rewards", Permission.REWARD)
    def record_rewards(self, run: str, attempt: str, new: Sequence[Reward]) -> wire.Recorded:
        """Record rewards of an active attempt; with an admin key also of an ended one, which rescores it."""

    @endpoint("POST", _ATTEMPT + "/finish", Permission.WORK)
    def finish(self, run: str, attempt: str, report: wire.FinishRequest) -> wire.FinishReply:
        """End an attempt. A repeated or late report is logged and changes nothing."""

    @endpoint("POST", _ATTEMPT + "/timeout", Permission.WORK)
    def time_out(self, run: str, attempt: str, report: wire.TimeoutRequest) -> wire.TimeoutReply:
        """Return the time that an attempt has left; if none, cut its calls in flight and refuse further ones."""

    # Workers and keys

    @endpoint("POST", "/api/lease", Permission.WORK, waits=True)
    def lease(self, request: wire.LeaseRequest) -> list[wire.Lease]:
        """Lease rollouts to a worker; wait if there are none."""

    @endpoint("GET", "/api/workers", Permission.READ_ALL)
    def list_workers(self) -> list[Worker]:
        """List the workers, most recently seen first."""

    @endpoint("POST", "/api/workers/{worker}/withdraw", Permission.WORK)
    def withdraw(self, worker: str) -> None:
        """Answer a worker's waiting lease requests at once, because it takes no more work."""

    @endpoint("POST", "/api/workers/{worker}/beat", Permission.WORK)
    def heartbeat(self, worker: str, running: wire.HeartbeatRequest) -> wire.HeartbeatReply:
        """Renew a worker's leases, and report which of its attempts to stop."""

    @endpoint("POST", "/api/keys", Permission.CREATE_KEYS)
    def create_key(self, spec: wire.KeySpec) -> wire.NewKey:
        """Create a key with no wider scope and no later expiry than the key of the request."""

    # What the dashboard shows

    @endpoint("GET", "/api/overview", Permission.VIEW)
    def overview(self) -> list[views.RunCard]:
        """List the runs that the key may see, newest first, with state, step and reward."""

    @endpoint("GET", _RUN + "/view", Permission.VIEW)
    def view_run(self, run: str) -> Run:
        """Return a run with its configuration."""

    @endpoint("GET", _RUN + "/card", Permission.VIEW)
    def run_card(self, run: str) -> views.RunCard:
        """Return state, step and reward of a run."""

    @endpoint("GET", _RUN + "/files", Permission.VIEW)
    def run_files(self, run: str) -> views.RunFiles:
        """Return the checkpoints of a run and the ends of its logs."""

    @endpoint("GET", _RUN + "/series", Permission.VIEW)
    def run_series(self, run: str, query: views.SeriesQuery) -> dict[str, views.Series]:
        """Return metrics by step; if there are more steps than points, as means with their range."""

    @endpoint("GET", _RUN + "/step_times", Permission.VIEW)
    def step_times(self, run: str, query: views.PointsQuery) -> views.Series:
        """Return when steps ended, in seconds since 1970."""

    @endpoint("GET", _RUN + "/rewards", Permission.VIEW)
    def run_rewards(self, run: str, query: views.PointsQuery) -> views.RunRewards:
        """Return the rewards by step, computed from the rollouts; of training in at most so many points."""

    @endpoint("GET", _RUN + "/comparison", Permission.VIEW)
    def compare_run(self, run: str, query: views.ComparisonQuery) -> views.Comparison:
        """Compare the last evaluation of another run with that of this one, task by task."""

    @endpoint("GET", _RUN + "/search", Permission.VIEW)
    def search_rollouts(self, run: str, query: views.RolloutQuery) -> views.RolloutListing:
        """Return a page of the rollouts that match the query."""

    @endpoint("GET", _RUN + "/tasks", Permission.VIEW)
    def list_tasks(self, run: str, query: views.TaskQuery) -> views.TaskListing:
        """Return a page of a run's tasks with success rate, mean reward and share of flat groups."""

    @endpoint("GET", _RUN + "/facets", Permission.VIEW)
    def facets(self, run: str) -> views.Facets:
        """Return the values by which rollouts can be filtered."""

    @endpoint("GET", _RUN + "/failures", Permission.VIEW)
    def failures(self, run: str) -> views.Failures:
        """Group failed rollouts by message."""

    @endpoint("GET", _ROLLOUT + "/view", Permission.VIEW)
    def view_rollout(self, run: str, rollout: str, query: views.AttemptQuery) -> views.RolloutView:
        """Return one attempt of a rollout, the last one unless another is named, with all that its page shows."""

    @endpoint("GET", _GROUP + "/tree", Permission.VIEW)
    def view_tree(self, run: str, group: str) -> views.PrefixTree:
        """Return the prefix tree of a group's calls."""

    @endpoint("GET", "/api/fleet", Permission.READ_ALL)
    def fleet(self) -> Fleet:
        """Return workers, engines, active attempts and the queue; also of trainings that run in the home folder."""
