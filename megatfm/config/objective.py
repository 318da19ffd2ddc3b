"""The `[objective]` section: a variant for each objective. `megatfm/objectives` has the papers."""

from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from megatfm.config.parts import ByName, PartName
from megatfm.config.section import Fraction, Section


class CausalObjective(Section):
    """Predict the next token. In an encoder-decoder, the encoder reads only the end token."""

    name: Literal["causal"] = "causal"
    mtp_loss_weight: NonNegativeFloat = 1.0
    """Weight of each further token's loss in a model with `n_mtp_heads`."""


class PrefixObjective(Section):
    """Predict the rest of a text after a prefix that all tokens see; in an encoder-decoder, the encoder reads it."""

    name: Literal["prefix"] = "prefix"


class MaskedObjective(Section):
    """Predict masked tokens (Devlin et al. 2019)."""

    name: Literal["masked"] = "masked"
    mask_rate: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Share of the tokens that is predicted."""
    mask_replace_prob: Fraction = 0.8
    """Share of the predicted tokens that is replaced by the mask token."""
    random_replace_prob: Fraction = 0.1
    """Share of the predicted tokens that is replaced by a random token; the others are kept."""
    whole_words: bool = False
    """Choose all tokens of a word, or none."""
    static: bool = False
    """Use the same mask in every epoch."""

    @property
    def target_fraction(self) -> float:
        """Share of the tokens with a target."""
        return self.mask_rate

    @model_validator(mode="after")
    def _check_shares(self) -> "MaskedObjective":
        if self.mask_replace_prob + self.random_replace_prob > 1 + 1e-9:
            raise ValueError(
                f"mask_replace_prob = {self.mask_replace_prob:g} and random_replace_prob = "
                f"{self.random_replace_prob:g} are more than 1 together: choose for example 0.8 and 0.1"
            )
        return self


class NextSentenceObjective(MaskedObjective):
    """Predict masked tokens, and whether the second segment follows the first or is from another document (BERT)."""

    name: Literal["next_sentence"] = "next_sentence"  # type: ignore[assignment]


class SentenceOrderObjective(MaskedObjective):
    """Predict masked tokens, and whether two segments of a text were swapped (ALBERT)."""

    name: Literal["sentence_order"] = "sentence_order"  # type: ignore[assignment]


class SpanBoundaryObjective(Section):
    """Predict masked spans of whole words, also from the tokens around them (SpanBERT)."""

    name: Literal["span_boundary"] = "span_boundary"
    mask_rate: Annotated[float, Field(gt=0, le=0.5)] = 0.15
    """Share of the words that is predicted."""
    mask_replace_prob: Fraction = 0.8
    """Share of the spans whose tokens are replaced by the mask token."""
    random_replace_prob: Fraction = 0.1
    """Share of the spans whose tokens are replaced by random ones; the others are kept."""
    geometric_p: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """p of the geometric distribution of a span's length in words."""
    max_span_words: PositiveInt = 10
    """Longest span, in words."""

    @property
    def target_fraction(self) -> float:
        """Share of the tokens with a target."""
        return self.mask_rate


class PermutationObjective(Section):
    """Predict spans token by token, in a random order (XLNet)."""

    name: Literal["permutation"] = "permutation"
    tokens_per_prediction: Annotated[int, Field(ge=2)] = 6
    """One token in this many is predicted (the paper's K)."""
    max_span: PositiveInt = 5
    """Longest span, in tokens; all lengths are equally frequent."""

    @property
    def target_fraction(self) -> float:
        """Share of the tokens with a target."""
        return 1 / self.tokens_per_prediction


class SpanCorruptionObjective(Section):
    """Replace spans by sentinels, and predict the spans (T5)."""

    name: Literal["span_corruption"] = "span_corruption"
    noise_density: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Share of the tokens in these spans."""
    mean_noise_span_length: Annotated[float, Field(ge=1)] = 3.0
    """Mean length of a span, in tokens."""


class UL2Objective(Section):
    """UL2's mixture of regular, extreme and sequential denoisers; by default, its seven with equal weights."""

    name: Literal["ul2"] = "ul2"
    r_denoiser_weight: NonNegativeFloat = 2.0
    """Weight of the two regular denoisers together: spans of mean 3 and 8, 15 % of the tokens."""
    x_denoiser_weight: NonNegativeFloat = 4.0
    """Weight of the four extreme denoisers together: long spans, or half of the tokens."""
    s_denoiser_weight: NonNegativeFloat = 1.0
    """Weight of the sequential denoiser: the end of the text, a quarter of it on average."""

    @model_validator(mode="after")
    def _check_weights(self) -> "UL2Objective":
        if self.r_denoiser_weight + self.x_denoiser_weight + self.s_denoiser_weight == 0:
            raise ValueError(
                "r_denoiser_weight, x_denoiser_weight and s_denoiser_weight are all 0: give at least one a weight"
            )
        return self


class ReplacedTokenObjective(Section):
    """A generator fills in masked tokens, and the model predicts which tokens were replaced (ELECTRA)."""

    name: Literal["replaced_token"] = "replaced_token"
    mask_rate: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Share of the tokens that the generator predicts."""
    mask_replace_prob: Fraction = 0.85
    """Share of these tokens that it sees as the mask token; it sees the others unchanged."""
    discriminator_weight: PositiveFloat = 50.0
    """Weight of the discriminator's loss; the generator's has 1."""

    @property
    def target_fraction(self) -> float:
        """Share of the tokens with a target."""
        return self.mask_rate


class TextClassificationObjective(Section):
    """Predict the labels of texts, pairs of texts or words; `megatfm finetune` sets it."""

    name: Literal["text_classification"] = "text_classification"
    lm_weight: NonNegativeFloat = 0.0
    """Weight of an auxiliary next-token loss, in decoders (Radford et al. 2018: 0.5)."""


class SpanExtractionObjective(Section):
    """Predict the span of a question's answer in a text; `megatfm finetune` sets it."""

    name: Literal["span_extraction"] = "span_extraction"


class MultipleChoiceObjective(Section):
    """Predict which of several choices is right; `megatfm finetune` sets it."""

    name: Literal["multiple_choice"] = "multiple_choice"
    lm_weight: NonNegativeFloat = 0.0
    """Weight of an auxiliary next-token loss, in decoders (Radford et al. 2018: 0.5)."""


class AnswersObjective(Section):
    """Predict the answers to prompts; `megatfm finetune` sets it."""

    name: Literal["answers"] = "answers"


class PreferenceObjective(Section):
    """Prefer one of two answers, relative to the initial model (DPO; Rafailov et al. 2023); `megatfm finetune` sets
    it."""

    name: Literal["preference"] = "preference"
    beta: PositiveFloat = 0.1
    """Factor on log-ratios; a larger one keeps the model closer to the initial model."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Assumed share of pairs with swapped labels (conservative DPO)."""


class ImageObjective(Section):
    """An objective whose inputs are images."""

    reads_text: ClassVar[bool] = False
    """Whether it also reads captions, and so needs a tokenizer."""


class ImageClassificationObjective(ImageObjective):
    """Predict the class of each image, by the head `model.extra_heads.classifier`."""

    name: Literal["image_classification"] = "image_classification"


class MaskedImageObjective(ImageObjective):
    """Predict the pixels of masked patches from the others (MAE; He et al. 2022)."""

    name: Literal["masked_image"] = "masked_image"
    mask_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.75
    """Share of the patches that is masked."""


class ContrastiveObjective(ImageObjective):
    """Match images and captions of the global batch (CLIP, Radford et al. 2021; SigLIP, Zhai et al. 2023);
    `model.contrastive` names the loss."""

    reads_text: ClassVar[bool] = True
    name: Literal["contrastive"] = "contrastive"
    begin_token: bool = True
    """Whether captions begin with the tokenizer's begin token (CLIP); all end with its end token."""
    pad_captions: bool = False
    """Pad captions to `model.text_tower.max_positions` by tokens that are attended to (SigLIP). Otherwise rows hold as
    many captions as fit."""


class ImageToTextObjective(ImageObjective):
    """Predict an image's text, token by token (LLaVA; Liu et al. 2023)."""

    reads_text: ClassVar[bool] = True
    name: Literal["image_to_text"] = "image_to_text"
    image_placement: Literal["before_text", "in_text"] = "before_text"
    """Position of images: before the text, or where it has `model.connector.image_token_id`, once for each."""
    begin_token: bool = True
    """Whether a text begins with the tokenizer's begin token; all end with its end token."""
    prompt_end_token_id: Annotated[int, Field(ge=0)] | None = Field(default=None, examples=[32001])
    """Id of the token that ends a prompt, which every text then has once: no loss is on this token and those before it.
    Left out, texts have no prompt."""


class SimMIMObjective(ImageObjective):
    """Predict the pixels of masked squares, which the model sees as mask tokens (SimMIM; Xie et al. 2022)."""

    name: Literal["simmim"] = "simmim"
    mask_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.6
    """Share of the squares that is masked, rounded up."""
    mask_size: PositiveInt = 32
    """Side of a square, in pixels."""


class PluginObjective(Section):
    """An objective that a package in `plugins` registers, with its own keys."""

    model_config = ConfigDict(extra="allow")
    name: Annotated[str, PartName("objective")] = Field(examples=["my_objective"])
    """The name under which it is registered."""


ObjectiveConfig = Annotated[
    CausalObjective
    | PrefixObjective
    | MaskedObjective
    | NextSentenceObjective
    | SentenceOrderObjective
    | SpanBoundaryObjective
    | PermutationObjective
    | SpanCorruptionObjective
    | UL2Objective
    | ReplacedTokenObjective
    | TextClassificationObjective
    | SpanExtractionObjective
    | MultipleChoiceObjective
    | AnswersObjective
    | PreferenceObjective
    | ImageClassificationObjective
    | MaskedImageObjective
    | ContrastiveObjective
    | ImageToTextObjective
    | SimMIMObjective
    | PluginObjective,
    ByName(),
]
