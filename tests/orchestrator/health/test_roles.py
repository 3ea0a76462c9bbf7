"""A role that is not trained on is named if it uses the weights that are."""

from smallepisodes import call, episode

from leyden.orchestrator.health.roles import shared_weights


def test_a_role_that_shares_trained_weights_is_named_with_how_to_freeze_it() -> None:
    episodes = [episode(0, 1.0, [call("a", 1, role="writer"), call("b", 1, role="critic")])]
    message = shared_weights(episodes, ["writer"], "policy")
    assert message is not None
    assert message.startswith("critic shares the weights of writer") and "leyden serve --model" in message
    assert shared_weights(episodes, ["writer", "rewriter"], "policy") == message  # the rewriter has another policy
    assert shared_weights(episodes, [], "policy") is None  # all roles are trained on
    assert shared_weights(episodes, ["writer", "critic"], "policy") is None
    assert shared_weights(episodes, ["writer"], "other") is None  # the critic's calls go elsewhere
