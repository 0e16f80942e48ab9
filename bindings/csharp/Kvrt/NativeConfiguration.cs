// Configurations as the library takes them: structs whose pointers lead to pinned arrays.
using System;
using System.Collections.Generic;
using System.Runtime.CompilerServices;
using System.Runtime.InteropServices;
using Kvrt.Native;

namespace Kvrt
{
    /// <summary>A pool's configuration and model, pinned until it is disposed.</summary>
    internal sealed unsafe class NativeConfiguration : IDisposable
    {
        private readonly List<GCHandle> pins = new List<GCHandle>();
        private kv_pool_config native;
        private kv_model nativeModel;

        public NativeConfiguration(PoolConfig config, Model model)
        {
            if (config == null)
            {
                throw new ArgumentNullException(nameof(config), "The configuration is null.");
            }
            if (model == null)
            {
                throw new ArgumentNullException(nameof(model), "The model is null.");
            }
            native.struct_size = (uint)sizeof(kv_pool_config);
            native.flags = (uint)config.Options;
            native.arena_bytes = config.ArenaBytes;
            native.device = (uint)config.Device;
            native.layout = (uint)config.Layout;
            native.block_tokens = config.BlockTokens;
            native.max_sequences = config.MaxSequences;
            native.max_tokens_per_sequence = config.MaxTokensPerSequence;
            native.max_step_sequences = config.MaxStepSequences;
            native.max_step_tokens = config.MaxStepTokens;
            native.threads = config.Threads;
            native.max_observed_sequences = config.MaxObservedSequences;
            native.pressure_percent = config.PressurePercent;
            try
            {
                Describe(model);
            }
            catch
            {
                Dispose();
                throw;
            }
        }

        /// <summary>A copy for one call, with that call's hooks.</summary>
        public kv_pool_config Config(kv_hooks* hooks)
        {
            kv_pool_config copy = native;
            copy.hooks = hooks;
            return copy;
        }

        public kv_model Model => nativeModel;

        /// <summary>Writes a preset into the native layers, and from there into copies of those
        /// that they were made of.</summary>
        [MethodImpl(MethodImplOptions.NoInlining)] // compiled once the library is there
        public Model WithPreset(Model source, Preset preset)
        {
            kv_layer* written = nativeModel.layers;
            int count = source.Layers.Count;
            kv_layer[] before = new kv_layer[count];
            for (int i = 0; i < count; ++i)
            {
                before[i] = written[i];
            }
            int status = NativeMethods.kv_model_apply_preset(written, (uint)count, (uint)preset);
            if (status < 0)
            {
                KvrtException.Throw(status, null);
            }
            var layers = new Layer[count];
            for (int i = 0; i < count; ++i)
            {
                layers[i] = source.Layers[i].Copy();
                layers[i].KeyFormat = (StorageFormat)written[i].key_format;
                layers[i].ValueFormat = (StorageFormat)written[i].value_format;
                if (written[i].key_storage != before[i].key_storage)
                {
                    layers[i].KeyStorage = ConstantOf(written[i].key_storage);
                }
                if (written[i].value_storage != before[i].value_storage)
                {
                    layers[i].ValueStorage = ConstantOf(written[i].value_storage);
                }
            }
            return new Model(layers);
        }

        /// <summary>A storage of the library's own, which has no arrays.</summary>
        private static Storage ConstantOf(kv_storage* source)
        {
            return source == null
                ? null : new Storage { Options = (StorageOptions)source->flags };
        }

        public void Dispose()
        {
            foreach (GCHandle pin in pins)
            {
                pin.Free();
            }
            pins.Clear();
        }

        private void Describe(Model source)
        {
            var layers = new kv_layer[source.Layers.Count];
            for (int i = 0; i < layers.Length; ++i)
            {
                layers[i] = Describe(source.Layers[i], i);
            }
            nativeModel.struct_size = (uint)sizeof(kv_model);
            nativeModel.layers = (kv_layer*)Pin(layers);
            nativeModel.layer_count = (uint)layers.Length;
        }

        private kv_layer Describe(Layer source, int index)
        {
            kv_layer layer = default;
            layer.struct_size = (uint)sizeof(kv_layer);
            layer.flags = source.SharedLayer.HasValue ? NativeConstants.KV_LAYER_SHARED : 0;
            layer.flags |= source.LanePerHead ? NativeConstants.KV_LAYER_LANE_PER_HEAD : 0;
            layer.flags |= source.CachePositions ? NativeConstants.KV_LAYER_CACHE_POSITIONS : 0;
            layer.query_heads = source.QueryHeads;
            layer.kv_heads = source.KvHeads;
            layer.key_dim = source.KeyDim;
            layer.value_dim = source.ValueDim;
            layer.key_format = (uint)source.KeyFormat;
            layer.value_format = (uint)source.ValueFormat;
            layer.shared_layer = source.SharedLayer.GetValueOrDefault();
            layer.window = source.Window;
            layer.window_sinks = source.WindowSinks;
            layer.softmax_scale = source.SoftmaxScale;
            layer.logit_softcap = source.LogitSoftcap;
            layer.sink_logits = (float*)Pin(
                source.SinkLogits, source.QueryHeads, index, nameof(Layer.SinkLogits));
            layer.alibi_slopes = (float*)Pin(
                source.AlibiSlopes, source.QueryHeads, index, nameof(Layer.AlibiSlopes));
            if (source.Rope != null)
            {
                layer.rope = (kv_rope*)Pin(new[] { Describe(source.Rope, source.KeyDim, index) });
            }
            layer.key_storage = Describe(source.KeyStorage, index);
            layer.value_storage = Describe(source.ValueStorage, index);
            layer.demoted_key_format = (uint)source.DemotedKeyFormat;
            layer.demoted_value_format = (uint)source.DemotedValueFormat;
            layer.demote_after = source.DemoteAfter;
            layer.demoted_key_storage = Describe(source.DemotedKeyStorage, index);
            layer.demoted_value_storage = Describe(source.DemotedValueStorage, index);
            return layer;
        }

        /// <summary>The library compares the number of scales with the layer's heads.</summary>
        private kv_storage* Describe(Storage source, int index)
        {
            if (source == null)
            {
                return null;
            }
            kv_storage storage = default;
            storage.struct_size = (uint)sizeof(kv_storage);
            storage.flags = (uint)source.Options;
            if (source.Scales != null)
            {
                storage.scales = (float*)Pin(source.Scales);
                storage.scale_count = (uint)source.Scales.Length;
            }
            ulong channels = (ulong)source.ChannelHeads * source.ChannelDim;
            storage.channel_means = (float*)Pin(
                source.ChannelMeans, channels, index, nameof(Storage.ChannelMeans));
            storage.channel_scales = (float*)Pin(
                source.ChannelScales, channels, index, nameof(Storage.ChannelScales));
            storage.channel_heads = source.ChannelHeads;
            storage.channel_dim = source.ChannelDim;
            return (kv_storage*)Pin(new[] { storage });
        }

        private kv_rope Describe(Rope source, uint keyDim, int index)
        {
            kv_rope rope = default;
            rope.struct_size = (uint)sizeof(kv_rope);
            rope.style = (uint)source.Style;
            rope.dimensions = source.Dimensions;
            rope.theta = source.Theta;
            rope.attention_factor = source.AttentionFactor;
            uint rotated = source.Dimensions != 0 ? source.Dimensions : keyDim;
            rope.inverse_frequencies = (double*)Pin(
                source.InverseFrequencies, rotated / 2, index, nameof(Rope.InverseFrequencies));
            return rope;
        }

        /// <summary>Pins an array that the library reads `needed` elements of. NULL for none.
        /// </summary>
        private IntPtr Pin<T>(T[] values, ulong needed, int layer, string name)
        {
            if (values == null)
            {
                return IntPtr.Zero;
            }
            if ((ulong)values.Length != needed)
            {
                throw new KvrtArgumentException(Status.Invalid,
                    $"layer {layer}: {name} holds {values.Length} elements, {needed} are needed");
            }
            return Pin(values);
        }

        private IntPtr Pin<T>(T[] values)
        {
            GCHandle pin = GCHandle.Alloc(values, GCHandleType.Pinned);
            pins.Add(pin);
            return pin.AddrOfPinnedObject();
        }
    }

    internal static unsafe class NativePolicy
    {
        public static kv_policy Describe(Policy source)
        {
            kv_policy policy = default;
            policy.struct_size = (uint)sizeof(kv_policy);
            policy.flags = (uint)source.Options;
            policy.scorer = (uint)source.Scorer;
            policy.selection = (uint)source.Selection;
            policy.budget = source.Budget;
            policy.every = source.Every;
            policy.prompt_tokens = source.PromptTokens;
            policy.sinks = source.Sinks;
            policy.recent = source.Recent;
            policy.offset_max = source.OffsetMax;
            policy.skip_layers = source.SkipLayers;
            policy.seed = source.Seed;
            policy.allocator = (uint)source.Allocator;
            policy.slack = source.Slack;
            policy.window = source.Window;
            policy.pool_width = source.PoolWidth;
            policy.observe_every = source.ObserveEvery;
            policy.decay = source.Decay;
            policy.prior_share = source.PriorShare;
            policy.redundancy = source.Redundancy;
            policy.similarity = source.Similarity;
            policy.floor_share = source.FloorShare;
            policy.threshold = source.Threshold;
            policy.steepness = source.Steepness;
            policy.value_reserve = source.ValueReserve;
            policy.segments = source.Segments;
            policy.segment_quota = source.SegmentQuota;
            return policy;
        }
    }
}
