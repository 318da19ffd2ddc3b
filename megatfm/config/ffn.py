"""The `[model.ffn]` section: a dense feed-forward network, or experts and the router that chooses among them."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from megatfm.config.parts import ByName, PartName
from megatfm.config.section import MAX_LENGTH, MAX_WIDTH, DropProbability, Section, find_nearest_divisor

ActivationName = Annotated[
    str,
    PartName(
        "activation",
        (
            *("relu", "relu2", "gelu", "gelu_tanh", "quick_gelu", "swish"),
            *("geglu", "geglu_tanh", "swiglu", "clamped_swiglu"),
        ),
    ),
]


class DenseFFNConfig(Section):
    """One feed-forward network for all tokens."""

    name: Literal["dense"] = "dense"
    d_ff: PositiveInt = Field(examples=[1024], le=MAX_WIDTH)
    """Inner width of the network."""
    activation: ActivationName = "swiglu"
    """Activation: relu, relu2, gelu, gelu_tanh, quick_gelu or swish; gated: geglu, geglu_tanh, swiglu or
    clamped_swiglu."""
    bias: bool = False
    """Biases in the projections."""
    dropout: DropProbability = 0.0
    """Dropout of the inner activations."""

    @property
    def tp_dims(self) -> dict[str, int]:
        """Sizes that tensor parallelism divides, by key."""
        return {"d_ff": self.d_ff}


class PluginFFNConfig(DenseFFNConfig):
    """A feed-forward network that a package in `plugins` registers, with its own keys."""

    model_config = ConfigDict(extra="allow")
    name: Annotated[str, PartName("feed-forward network")] = Field(examples=["my_ffn"])  # type: ignore[assignment]
    """The name under which it is registered."""

    @property
    def tp_dims(self) -> dict[str, int]:
        """Return no sizes: a plugin's network is not sharded."""
        return {}


class RouterSection(Section):
    """Keys of every router."""

    name: str
    aux_loss_coef: NonNegativeFloat = 0.0
    """Weight of the loss that balances experts over the global batch, by their shares in the step before."""
    seq_aux_loss_coef: NonNegativeFloat = 0.0
    """Weight of the loss that balances experts within each row."""
    z_loss_coef: NonNegativeFloat = 0.0
    """Weight of the loss that keeps logits small (Zoph et al. 2022)."""

    balance_losses: ClassVar[tuple[str, ...]] = ()
    """Further loss terms: NAME has the weight `NAME_loss_coef`."""
    unsupported_keys: ClassVar[tuple[str, ...]] = ()
    """Keys of `[model.ffn]` or the router that have no meaning with this router."""
    is_bidirectional: ClassVar[bool] = False
    """Whether a token's experts depend on later tokens, so that only encoders can use the router."""


class TopKRouterConfig(RouterSection):
    """The experts with the highest softmax (Mixtral, Qwen3, OLMoE)."""

    name: Literal["top_k"] = "top_k"
    norm_topk_prob: bool = True
    """Normalise the weights of the chosen experts to a sum of 1."""
    bias: bool = False
    """A bias for each expert in the router's matrix (gpt-oss)."""


class SwitchRouterConfig(RouterSection):
    """The one most probable expert (Fedus et al. 2022)."""

    name: Literal["switch"] = "switch"
    jitter: DropProbability = 0.0
    """In training, the router's input is multiplied by uniform factors from 1 − jitter to 1 + jitter."""


class NoisyTopKRouterConfig(RouterSection):
    """The highest logits with noise of learned strength (Shazeer et al. 2017)."""

    name: Literal["noisy_top_k"] = "noisy_top_k"
    balance_losses: ClassVar[tuple[str, ...]] = ("importance", "load")
    importance_loss_coef: NonNegativeFloat = 0.0
    """Weight of the loss that balances the experts' weights over the global batch."""
    load_loss_coef: NonNegativeFloat = 0.0
    """Weight of the loss that balances the probabilities of experts to be chosen over the global batch."""


class GShardRouterConfig(RouterSection):
    """The best expert, and by chance the second best (Lepikhin et al. 2021)."""

    name: Literal["gshard"] = "gshard"


class HashRouterConfig(RouterSection):
    """Experts by a hash of the token; nothing is learned (Roller et al. 2021)."""

    name: Literal["hash"] = "hash"
    unsupported_keys: ClassVar[tuple[str, ...]] = ("aux_loss_coef", "seq_aux_loss_coef", "z_loss_coef")


class ExpertChoiceRouterConfig(RouterSection):
    """Experts choose tokens, in encoders; `top_k` is the mean number of a token's experts (Zhou et al. 2022)."""

    name: Literal["expert_choice"] = "expert_choice"
    unsupported_keys: ClassVar[tuple[str, ...]] = (
        "aux_loss_coef",
        "seq_aux_loss_coef",
        "capacity_factor",
        "expert_capacity",
    )
    is_bidirectional: ClassVar[bool] = True


class GroupedRouterSection(RouterSection):
    """A router that chooses from the best groups of experts."""

    n_group: PositiveInt = 1
    """Number of groups of neighbouring experts."""
    topk_group: PositiveInt = 1
    """Number of groups from which a token's experts are chosen."""
    routed_scaling_factor: PositiveFloat = 1.0
    """Factor on the weights."""


class DeepSeekV2RouterConfig(GroupedRouterSection):
    """The highest softmax, from the groups whose best expert has the highest (DeepSeek-AI 2024a, section 2.2)."""

    name: Literal["deepseek_v2"] = "deepseek_v2"


class DeepSeekV3RouterConfig(GroupedRouterSection):
    """Sigmoid scores from the best groups, balanced by a bias without a loss (DeepSeek-AI 2024)."""

    name: Literal["deepseek_v3"] = "deepseek_v3"
    norm_topk_prob: bool = True
    """Normalise the weights of the chosen experts to a sum of `routed_scaling_factor`."""
    bias_update_rate: NonNegativeFloat = 0.001
    """Step by which the bias of an expert moves after each training step."""


class PluginRouterConfig(RouterSection):
    """A router that a package in `plugins` registers, with its own keys."""

    model_config = ConfigDict(extra="allow")
    name: Annotated[str, PartName("router (model.ffn.router)")] = Field(examples=["my_router"])
    """The name under which it is registered."""


RouterConfig = Annotated[
    TopKRouterConfig
    | SwitchRouterConfig
    | NoisyTopKRouterConfig
    | GShardRouterConfig
    | HashRouterConfig
    | ExpertChoiceRouterConfig
    | DeepSeekV2RouterConfig
    | DeepSeekV3RouterConfig
    | PluginRouterConfig,
    ByName(),
]


class MoEConfig(DenseFFNConfig):
    """Experts, some of which a router chooses for each token; `d_ff` is the inner width of one expert."""

    name: Literal["moe"] = "moe"  # type: ignore[assignment]
    n_experts: PositiveInt = Field(examples=[8], le=MAX_WIDTH)
    """Number of routed experts."""
    top_k: PositiveInt = Field(examples=[2], le=MAX_WIDTH)
    """Number of routed experts of a token."""
    n_shared_experts: NonNegativeInt = Field(default=0, le=MAX_WIDTH)
    """Number of shared experts, through which all tokens go: one network that many times as wide."""
    capacity_factor: PositiveFloat | None = None
    """Tokens of a row that an expert takes, as a multiple of its even share; left out, all that choose it. A limit of
    training and evaluation; generation has none."""
    expert_capacity: PositiveInt | None = Field(default=None, le=MAX_LENGTH)
    """Tokens of a row that an expert takes, as a number (transformers' Switch); left out, `capacity_factor` decides."""
    drop_policy: Literal["choice", "position"] = "choice"
    """Choices that a full expert drops first. "choice": last choices before first ones (GShard), so that with `top_k`
    of 2 and more a token depends on later ones; "position": those of later tokens."""
    router: RouterConfig = TopKRouterConfig()
    """The router that chooses."""

    @property
    def has_capacity(self) -> bool:
        """Whether the number of a row's tokens that an expert takes is limited."""
        return self.capacity_factor is not None or self.expert_capacity is not None

    @property
    def tp_dims(self) -> dict[str, int]:
        """Sizes that tensor parallelism divides, by key."""
        return {
            "n_experts": self.n_experts,
            **({"d_ff": self.d_ff * self.n_shared_experts} if self.n_shared_experts else {}),
        }

    @property
    def shared_ffn(self) -> dict[str, object]:
        """The `[model.ffn]` section of the shared experts."""
        return {
            "name": "dense",
            "d_ff": self.n_shared_experts * self.d_ff,
            "activation": self.activation,
            "bias": self.bias,
        }

    @model_validator(mode="after")
    def _check_top_k_and_dropout(self) -> Self:
        if self.top_k > self.n_experts:
            raise ValueError(
                f"top_k = {self.top_k} is more than n_experts = {self.n_experts}: choose {self.n_experts} or less"
            )
        if self.dropout:
            raise ValueError(f"dropout = {self.dropout!r} is for dense networks, experts have none: leave it out")
        if self.capacity_factor and self.expert_capacity:
            raise ValueError(
                f"capacity_factor = {self.capacity_factor} and expert_capacity = {self.expert_capacity} say "
                f"the same thing twice: leave one out"
            )
        if self.drop_policy != "choice" and not self.has_capacity:
            raise ValueError(
                f"drop_policy = {self.drop_policy!r} has no meaning where experts take all tokens: leave it out, or "
                "give capacity_factor or expert_capacity"
            )
        router = self.router
        if isinstance(router, SwitchRouterConfig) and self.top_k != 1:
            raise ValueError(
                f"top_k = {self.top_k}, but router.name = 'switch' chooses one: set top_k = 1, or router.name = 'top_k'"
            )
        if isinstance(router, GShardRouterConfig) and self.top_k != 2:
            raise ValueError(f"top_k = {self.top_k}, but router.name = 'gshard' chooses two: set top_k = 2")
        if isinstance(router, NoisyTopKRouterConfig) and self.top_k == self.n_experts:
            remedy = f"top_k = {self.n_experts - 1} or less" if self.n_experts > 1 else "n_experts = 2 or more"
            raise ValueError(
                f"top_k = {self.top_k} = n_experts leaves router.name = 'noisy_top_k' nothing to choose: set {remedy}"
            )
        for key in router.unsupported_keys:
            value = getattr(router, key) if key in type(router).model_fields else getattr(self, key)
            if value:
                raise ValueError(f"{key} = {value} has no meaning with router.name = {router.name!r}: leave it out")
        if isinstance(router, GroupedRouterSection):
            _check_groups(self, router)
        return self


class SoftMoEConfig(MoEConfig):
    """Experts of weighted means of tokens, in encoders (Puigcerver et al. 2024)."""

    name: Literal["soft_moe"] = "soft_moe"  # type: ignore[assignment]
    slots: PositiveInt = Field(default=1, le=MAX_WIDTH)
    """Number of means of a document for each expert."""
    top_k: Literal[1] = 1
    """Experts of a slot."""

    @model_validator(mode="after")
    def _refuse_router(self) -> Self:
        refused = {"router", "capacity_factor", "expert_capacity", "n_shared_experts"} & self.model_fields_set
        for key in sorted(refused):
            if getattr(self, key) not in (None, 0, TopKRouterConfig()):
                raise ValueError(f"{key} has no meaning with name = 'soft_moe', which chooses no experts: leave it out")
        return self


FFNConfig = Annotated[DenseFFNConfig | MoEConfig | SoftMoEConfig | PluginFFNConfig, ByName()]


def _check_groups(experts: MoEConfig, router: GroupedRouterSection) -> None:
    n_experts, groups, best = experts.n_experts, router.n_group, router.topk_group
    if n_experts % groups:
        nearest = find_nearest_divisor(n_experts, groups)
        raise ValueError(
            f"router.n_group = {groups} does not divide n_experts = {n_experts}: the nearest that does is {nearest}"
        )
    if best > groups:
        raise ValueError(f"router.topk_group = {best} is more than router.n_group = {groups}: choose {groups} or less")
    if experts.top_k > best * (n_experts // groups):
        raise ValueError(
            f"top_k = {experts.top_k}, but router.topk_group = {best} groups have {best * (n_experts // groups)} "
            f"experts: choose router.topk_group = {-(-experts.top_k * groups // n_experts)} or more"
        )
