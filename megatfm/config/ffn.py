"""The `[model.ffn]` section: a dense feed-forward network, or experts and the router that chooses among them."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from megatfm.config.section import (
    MAX_LENGTH,
    MAX_WIDTH,
    ByName,
    DropProbability,
    Section,
    nearest_divisor,
)


class DenseFFNConfig(Section):
    """One feed-forward network, which all tokens go through."""

    name: Literal["dense"] = "dense"
    d_ff: PositiveInt = Field(examples=[1024], le=MAX_WIDTH)
    """Inner width of the network."""
    activation: str = "swiglu"
    """Activation: gelu, swiglu or another that is registered."""
    bias: bool = False
    """Biases in its projections."""
    dropout: DropProbability = 0.0
    """Dropout of the inner activations."""

    @property
    def tp_dims(self) -> dict[str, int]:
        """Sizes that tensor parallelism divides, by key."""
        return {"d_ff": self.d_ff}


class PluginFFNConfig(DenseFFNConfig):
    """A feed-forward network that a package in `plugins` registers, with its own keys."""

    model_config = ConfigDict(extra="allow")
    name: str = Field(examples=["my_ffn"])  # type: ignore[assignment]
    """The name under which it is registered."""

    @property
    def tp_dims(self) -> dict[str, int]:
        """Nothing is known of how it is cut."""
        return {}


class RouterSection(Section):
    """Keys of every router."""

    name: str
    aux_loss_coef: NonNegativeFloat = 0.0
    """Weight of the loss that evens experts out over the global batch, by the shares that they had a step before."""
    seq_aux_loss_coef: NonNegativeFloat = 0.0
    """Weight of the loss that evens experts out within each row."""
    z_loss_coef: NonNegativeFloat = 0.0
    """Weight of the loss that keeps logits small (Zoph et al. 2022)."""

    evens: ClassVar[tuple[str, ...]] = ()
    """Further keys that are weights of terms of the loss."""
    without: ClassVar[tuple[str, ...]] = ()
    """Keys of the section of experts, or of the router, that have no meaning with it."""
    of_encoders: ClassVar[bool] = False
    """A token's experts depend on later tokens."""


class TopKRouterConfig(RouterSection):
    """The experts with the highest softmax (Mixtral, Qwen3, OLMoE)."""

    name: Literal["top_k"] = "top_k"
    norm_topk_prob: bool = True
    """Have the weights of the chosen add up to 1."""
    bias: bool = False
    """A bias for each expert in the router's matrix (gpt-oss)."""


class SwitchRouterConfig(RouterSection):
    """The one most probable expert (Fedus et al. 2022)."""

    name: Literal["switch"] = "switch"
    jitter: DropProbability = 0.0
    """In training, the router's input is multiplied by numbers that differ by up to this much from 1."""


class NoisyTopKRouterConfig(RouterSection):
    """The highest logits with noise added, whose strength is learned (Shazeer et al. 2017)."""

    name: Literal["noisy_top_k"] = "noisy_top_k"
    evens: ClassVar[tuple[str, ...]] = ("importance", "load")
    importance_loss_coef: NonNegativeFloat = 0.0
    """Weight of the loss that evens out the weights which experts have over the global batch."""
    load_loss_coef: NonNegativeFloat = 0.0
    """Weight of the loss that evens out how probably experts are chosen over the global batch."""


class GShardRouterConfig(RouterSection):
    """The best expert, and by chance the second best (Lepikhin et al. 2021)."""

    name: Literal["gshard"] = "gshard"


class HashRouterConfig(RouterSection):
    """Experts by the token itself; nothing is learned (Roller et al. 2021)."""

    name: Literal["hash"] = "hash"
    without: ClassVar[tuple[str, ...]] = ("aux_loss_coef", "seq_aux_loss_coef", "z_loss_coef")


class ExpertChoiceRouterConfig(RouterSection):
    """Experts choose tokens, in encoders; `top_k` is what a token has on average (Zhou et al. 2022)."""

    name: Literal["expert_choice"] = "expert_choice"
    without: ClassVar[tuple[str, ...]] = (
        "aux_loss_coef",
        "seq_aux_loss_coef",
        "capacity_factor",
        "expert_capacity",
    )
    of_encoders: ClassVar[bool] = True


class GroupedRouterSection(RouterSection):
    """A router that chooses from the best groups of experts."""

    n_group: PositiveInt = 1
    """Groups of neighbouring experts."""
    topk_group: PositiveInt = 1
    """Groups from which a token's experts are chosen."""
    routed_scaling_factor: PositiveFloat = 1.0
    """Factor on the weights."""


class DeepSeekV2RouterConfig(GroupedRouterSection):
    """The highest softmax, from the groups whose best expert has the highest (DeepSeek-AI 2024a, section 2.2)."""

    name: Literal["deepseek_v2"] = "deepseek_v2"


class DeepSeekV3RouterConfig(GroupedRouterSection):
    """Sigmoid scores, from the best groups, evened out by a bias without a loss (DeepSeek-AI 2024)."""

    name: Literal["deepseek_v3"] = "deepseek_v3"
    norm_topk_prob: bool = True
    """Have the weights of the chosen add up to `scale`."""
    bias_update_rate: NonNegativeFloat = 0.001
    """Step by which the bias of an expert moves after each training step."""


class PluginRouterConfig(RouterSection):
    """A router that a package in `plugins` registers, with its own keys."""

    model_config = ConfigDict(extra="allow")
    name: str = Field(examples=["my_router"])
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
    """Experts, of which a router chooses some for each token; `d_ff` is the inner width of one."""

    name: Literal["moe"] = "moe"  # type: ignore[assignment]
    n_experts: PositiveInt = Field(examples=[8], le=MAX_WIDTH)
    """Experts to choose from."""
    top_k: PositiveInt = Field(examples=[2], le=MAX_WIDTH)
    """Experts that a token goes through."""
    n_shared_experts: NonNegativeInt = Field(default=0, le=MAX_WIDTH)
    """Experts that all tokens go through besides: one network so many times as wide."""
    capacity_factor: PositiveFloat | None = None
    """Tokens of a row that an expert takes, as a multiple of its even share; left out, all that choose it. A limit of
    training and evaluation; generation has none."""
    expert_capacity: PositiveInt | None = Field(default=None, le=MAX_LENGTH)
    """`capacity` as a number of tokens, however long rows are (transformers' Switch); left out, as `capacity` says."""
    drop_policy: Literal["choice", "position"] = "choice"
    """Choices that are dropped first when an expert is full: "choice", last choices before first ones (GShard), so that
    with `top_k` of 2 and more a token depends on later ones; "position", those of later tokens."""
    router: RouterConfig = TopKRouterConfig()
    """The router that chooses."""

    @property
    def is_limited(self) -> bool:
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
    def shared(self) -> dict[str, object]:
        """The section of the shared experts."""
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
            raise ValueError(
                f"dropout = {self.dropout!r} is for dense networks, experts have none: leave it out"
            )
        if self.capacity_factor and self.expert_capacity:
            raise ValueError(
                f"capacity_factor = {self.capacity_factor} and expert_capacity = {self.expert_capacity} say "
                f"the same thing twice: leave one out"
            )
        if self.drop_policy != "choice" and not self.is_limited:
            raise ValueError(
                f"drop_policy = {self.drop_policy!r} has no meaning where experts take all tokens: leave it out, or "
                "give capacity"
            )
        router = self.router
        if isinstance(router, SwitchRouterConfig) and self.top_k != 1:
            raise ValueError(
                f"top_k = {self.top_k}, but router.name = 'switch' chooses one: set top_k = 1, or router.name = 'top_k'"
            )
        if isinstance(router, GShardRouterConfig) and self.top_k != 2:
            raise ValueError(f"top_k = {self.top_k}, but router.name = 'gshard' chooses two: set top_k = 2")
        if isinstance(router, NoisyTopKRouterConfig) and self.top_k == self.n_experts:
            raise ValueError(
                f"top_k = {self.top_k} = n_experts leaves router.name = 'noisy_top_k' nothing to choose: set top_k = "
                f"{self.n_experts - 1} or less"
            )
        for key in router.without:
            value = getattr(router, key) if key in type(router).model_fields else getattr(self, key)
            if value:
                raise ValueError(
                    f"{key} = {value} has no meaning with router.name = {router.name!r}: leave it out"
                )
        if isinstance(router, GroupedRouterSection):
            _check_groups(self, router)
        return self


class SoftMoEConfig(MoEConfig):
    """Experts that get means of tokens, in encoders (Puigcerver et al. 2024)."""

    name: Literal["soft_moe"] = "soft_moe"  # type: ignore[assignment]
    slots: PositiveInt = Field(default=1, le=MAX_WIDTH)
    """Means that each expert gets of a document."""
    top_k: Literal[1] = 1
    """Experts of a slot."""

    @model_validator(mode="after")
    def _refuse_router(self) -> Self:
        set_keys = {
            "router",
            "capacity_factor",
            "expert_capacity",
            "n_shared_experts",
        } & self.model_fields_set
        for key in sorted(set_keys):
            if getattr(self, key) not in (None, 0, TopKRouterConfig()):
                raise ValueError(
                    f"{key} has no meaning with name = 'soft_moe', which chooses no experts: leave it out"
                )
        return self


FFNConfig = Annotated[
    DenseFFNConfig | MoEConfig | SoftMoEConfig | PluginFFNConfig,
    ByName(),
]


def _check_groups(experts: MoEConfig, router: GroupedRouterSection) -> None:
    n, groups, best = experts.n_experts, router.n_group, router.topk_group
    if n % groups:
        nearest = nearest_divisor(n, groups)
        raise ValueError(
            f"router.n_group = {groups} does not divide n_experts = {n}: the nearest that does is {nearest}"
        )
    if best > groups:
        raise ValueError(
            f"router.topk_group = {best} is more than router.n_group = {groups}: choose {groups} or less"
        )
    if experts.top_k > best * (n // groups):
        raise ValueError(
            f"top_k = {experts.top_k}, but router.topk_group = {best} groups have {best * (n // groups)} experts: "
            f"choose router.topk_group = {-(-experts.top_k * groups // n)} or more"
        )
