// What a pool and a sequence are created with: limits, layers, rotation, policy. Zero and null mean
// the library's default, as in kvrt.h; the library checks the values.
using System;
using System.Collections.Generic;
using System.Linq;
using Kvrt.Native;

namespace Kvrt
{
    /// <summary>All that a pool will ever need is allocated at creation, by these limits.</summary>
    public sealed class PoolConfig
    {
        /// <summary>Bytes for keys and values, in slabs of 2 MiB. The one that must be
        /// set.</summary>
        public ulong ArenaBytes { get; set; }

        /// <summary>Switches.</summary>
        public PoolOptions Options { get; set; }

        /// <summary>Where the pool lives.</summary>
        public Device Device { get; set; }

        /// <summary>How the tiles of a block lie.</summary>
        public BlockLayout Layout { get; set; }

        /// <summary>Slots of a block: 16 (default), 32, 64 or 128.</summary>
        public uint BlockTokens { get; set; }

        /// <summary>Alive at once; default 64.</summary>
        public uint MaxSequences { get; set; }

        /// <summary>Retained at once; default 32768.</summary>
        public uint MaxTokensPerSequence { get; set; }

        /// <summary>In one step; default <see cref="MaxSequences"/>.</summary>
        public uint MaxStepSequences { get; set; }

        /// <summary>In one step; default 8192.</summary>
        public uint MaxStepTokens { get; set; }

        /// <summary>Of the library's own pool of threads, the caller's included; 0: one per
        /// processor. </summary>
        public uint Threads { get; set; }

        /// <summary>What the host does itself; may be null.</summary>
        public Hooks Hooks { get; set; }

        /// <summary>Sequences whose policies need observed attention, or scores of the host. Each
        /// takes host memory: 12 bytes per layer, KV head and token of <see
        /// cref="MaxTokensPerSequence"/>.</summary>
        public uint MaxObservedSequences { get; set; }

        /// <summary>When more of the arena is pinned at a step's end, policies of sequences outside
        /// of open steps run at once, until that is over; 0: never.</summary>
        public uint PressurePercent { get; set; }
    }

    /// <summary>The layers of a model, in order.</summary>
    public sealed class Model
    {
        /// <summary>A model of these layers; the same one may stand in it many times.</summary>
        public Model(IEnumerable<Layer> layers)
        {
            if (layers == null)
            {
                throw new ArgumentNullException(nameof(layers));
            }
            Layer[] all = layers.ToArray();
            if (all.Contains(null))
            {
                throw new ArgumentNullException(nameof(layers), "A layer is null.");
            }
            Layers = all;
        }

        /// <summary>The layers.</summary>
        public IReadOnlyList<Layer> Layers { get; }

        /// <summary>A model of copies of these layers, with the formats and storages of a preset,
        /// whatever they had. Layers that share another's cache are copied as they are.</summary>
        public Model WithPreset(Preset preset)
        {
            NativeLoader.Load();
            using (var source = new NativeConfiguration(new PoolConfig(), this))
            {
                return source.WithPreset(this, preset);
            }
        }
    }

    /// <summary>One layer. Defaults fit a Llama-like one once heads and dimensions are
    /// set.</summary>
    public sealed class Layer
    {
        /// <summary>A multiple of <see cref="KvHeads"/>.</summary>
        public uint QueryHeads { get; set; }

        /// <summary>Heads of keys and values.</summary>
        public uint KvHeads { get; set; }

        /// <summary>32 to 256, a multiple of 8.</summary>
        public uint KeyDim { get; set; }

        /// <summary>32 to 256, a multiple of 8; 0: <see cref="KeyDim"/>.</summary>
        public uint ValueDim { get; set; }

        /// <summary>How keys are stored.</summary>
        public StorageFormat KeyFormat { get; set; }

        /// <summary>How values are stored; default: as keys.</summary>
        public StorageFormat ValueFormat { get; set; }

        /// <summary>What keys are stored with besides their format; null: nothing.</summary>
        public Storage KeyStorage { get; set; }

        /// <summary>What values are stored with besides their format; null: nothing.</summary>
        public Storage ValueStorage { get; set; }

        /// <summary>An earlier layer whose cache this one attends over, storing nothing; null: this
        /// one stores.</summary>
        public uint? SharedLayer { get; set; }

        /// <summary>Each KV head has blocks of its own, so that policies may keep other numbers of
        /// tokens in each. Not with <see cref="SharedLayer"/>.</summary>
        public bool LanePerHead { get; set; }

        /// <summary>Queries and keys are handed over before rotation: the library rotates them, as
        /// <see cref="Rope"/> says, by their places in the cache. Not with <see
        /// cref="SharedLayer"/>, which follows its owner.</summary>
        public bool CachePositions { get; set; }

        /// <summary>A query at p sees positions above p - window; 0: all.</summary>
        public uint Window { get; set; }

        /// <summary>Positions below this stay visible behind the window.</summary>
        public uint WindowSinks { get; set; }

        /// <summary>0: 1 / sqrt(<see cref="KeyDim"/>).</summary>
        public float SoftmaxScale { get; set; }

        /// <summary>Logits become cap * tanh(logit / cap); 0: off.</summary>
        public float LogitSoftcap { get; set; }

        /// <summary>[query_heads]: a learned logit that joins the denominator alone; or null.
        /// </summary>
        public float[] SinkLogits { get; set; }

        /// <summary>[query_heads]: slope * (key position - query position) is added; or null.
        /// </summary>
        public float[] AlibiSlopes { get; set; }

        /// <summary>How keys and queries were rotated; null: not, or not told.</summary>
        public Rope Rope { get; set; }

        /// <summary>Full blocks of older tokens are coded into this format, from the oldest on, and
        /// their bytes return: token-local, and not <see cref="StorageFormat.Affine4"/>. Keys and
        /// values are f32, f16 or bf16 before. Default: nothing is demoted.</summary>
        public StorageFormat DemotedKeyFormat { get; set; }

        /// <summary>The same of values: token-local, or <see cref="ValueFormat"/>; default: as
        /// keys.</summary>
        public StorageFormat DemotedValueFormat { get; set; }

        /// <summary>Blocks behind the newest so many retained tokens are demoted at the end of
        /// steps; 0: only under pressure (<see cref="PoolConfig.PressurePercent"/>), before
        /// policies
        /// evict.</summary>
        public uint DemoteAfter { get; set; }

        /// <summary>What demoted keys are stored with; null: nothing. With
        /// <see cref="StorageOptions.Rotate"/> keys are written rotated, too.</summary>
        public Storage DemotedKeyStorage { get; set; }

        /// <summary>What demoted values are stored with; null: nothing.</summary>
        public Storage DemotedValueStorage { get; set; }

        internal Layer Copy()
        {
            return (Layer)MemberwiseClone();
        }
    }

    /// <summary>What the keys or the values of a layer are stored with, besides their
    /// format.</summary>
    public sealed class Storage
    {
        /// <summary>Static scales, finite and positive: one of the layer, or one per KV head. For
        /// <see cref="StorageFormat.Float8E4M3"/>, <see cref="StorageFormat.Float8E5M2"/> and
        /// <see cref="StorageFormat.NvFp4"/> only; null: none.</summary>
        public float[] Scales { get; set; }

        /// <summary>[<see cref="ChannelHeads"/>, <see cref="ChannelDim"/>]: constants for
        /// <see cref="StorageFormat.Affine4"/>, which <see cref="Pool.FitAffine"/> measures; null:
        /// none. They belong to the model like its weights: pools and processes that exchange bytes
        /// need the same.</summary>
        public float[] ChannelMeans { get; set; }

        /// <summary>As many as <see cref="ChannelMeans"/>, finite and positive.</summary>
        public float[] ChannelScales { get; set; }

        /// <summary>The layer's <see cref="Layer.KvHeads"/>.</summary>
        public uint ChannelHeads { get; set; }

        /// <summary>The layer's <see cref="Layer.KeyDim"/>.</summary>
        public uint ChannelDim { get; set; }

        /// <summary>Switches.</summary>
        public StorageOptions Options { get; set; }
    }

    /// <summary>How the engine rotated keys and queries. Needed by TriAttention, and by
    /// keys in <see cref="StorageFormat.Affine4"/>.</summary>
    public sealed class Rope
    {
        /// <summary>Which dimensions are paired.</summary>
        public RopeStyle Style { get; set; }

        /// <summary>Rotated dimensions, the first ones of a head; 0: all.</summary>
        public uint Dimensions { get; set; }

        /// <summary>Base; 0: 10000. Ignored when <see cref="InverseFrequencies"/> are
        /// given.</summary>
        public double Theta { get; set; }

        /// <summary>Factor on rotated queries and on rotated keys; 0: 1.</summary>
        public double AttentionFactor { get; set; }

        /// <summary>[dimensions / 2]: the model's actual ones; or null.</summary>
        public double[] InverseFrequencies { get; set; }
    }

    /// <summary>Which tokens to retain.</summary>
    public sealed class Policy
    {
        /// <summary>How tokens are ranked.</summary>
        public Scorer Scorer { get; set; }

        /// <summary>Which sets of survivors may differ.</summary>
        public Selection Selection { get; set; }

        /// <summary>Switches.</summary>
        public PolicyOptions Options { get; set; }

        /// <summary>Tokens retained per layer and head after a round.</summary>
        public uint Budget { get; set; }

        /// <summary>A round at step end when this many tokens were accepted since the last; 0: only
        /// <see cref="Pool.Compress"/>.</summary>
        public uint Every { get; set; }

        /// <summary>The prompt's length, for what is said of the prompt.</summary>
        public uint PromptTokens { get; set; }

        /// <summary>Positions below this stay.</summary>
        public uint Sinks { get; set; }

        /// <summary>The last so many tokens stay.</summary>
        public uint Recent { get; set; }

        /// <summary>TriAttention: largest future offset, a power of two; 0: 65536.</summary>
        public uint OffsetMax { get; set; }

        /// <summary>The first so many layers are left whole (KeyNorm: 2 is usual).</summary>
        public uint SkipLayers { get; set; }

        /// <summary>Of all draws.</summary>
        public ulong Seed { get; set; }

        /// <summary>How many tokens each layer and head keeps.</summary>
        public Allocator Allocator { get; set; }

        /// <summary>A round at step end when more than this is retained above what a round keeps;
        /// 0: <see cref="Every"/> alone decides.</summary>
        public uint Slack { get; set; }

        /// <summary>Scissorhands, SnapKv, RKv, VaseAttention: the last so many queries count; 0:
        /// 400, 64, 8, 64.</summary>
        public uint Window { get; set; }

        /// <summary>Odd, at most 127: scores by attention, and of the host, become the mean of so
        /// many neighbours; 0: the scorer's own.</summary>
        public uint PoolWidth { get; set; }

        /// <summary>Attention of one-token steps is observed in every so-manieth alone; 0: 4 for
        /// H2o and Blend, 1 for the others.</summary>
        public uint ObserveEvery { get; set; }

        /// <summary>H2o, Blend: what a query counts after each one behind it; 0: 1 and
        /// 0.97.</summary>
        public float Decay { get; set; }

        /// <summary>Blend: share of what is expected; the rest is of what was; 0: 0.1.</summary>
        public float PriorShare { get; set; }

        /// <summary>RKv: weight of redundancy, up to 1; 0: 0.9. Blend: share of what
        /// stays for being unlike other keys; 0: 0.3.</summary>
        public float Redundancy { get; set; }

        /// <summary><see cref="PolicyOptions.ExactRedundancy"/>: keys are similar above this
        /// cosine; 0: 0.5.</summary>
        public float Similarity { get; set; }

        /// <summary><see cref="Kvrt.Allocator.Adaptive"/>: of its budget each head is sure of; 0:
        /// 0.2.</summary>
        public float FloorShare { get; set; }

        /// <summary>Of <see cref="Kvrt.Allocator.Threshold"/>.</summary>
        public float Threshold { get; set; }

        /// <summary><see cref="Kvrt.Allocator.Pyramid"/>: the last layer has budget / steepness; 0:
        /// 20.</summary>
        public uint Steepness { get; set; }

        /// <summary>So many tokens whose values have the widest range stay; 0: none, VaseAttention
        /// a quarter of the budget.</summary>
        public uint ValueReserve { get; set; }

        /// <summary>The prompt in so many equal parts, at most 4096, of each of which at least <see
        /// cref="SegmentQuota"/> tokens stay; 0: off.</summary>
        public uint Segments { get; set; }

        /// <summary>So many tokens of each of the <see cref="Segments"/> stay, the best.</summary>
        public uint SegmentQuota { get; set; }
    }
}
