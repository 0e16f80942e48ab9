// Constants of channels, which StorageFormat.Affine4 stores keys with.
using Kvrt.Native;

namespace Kvrt
{
    public sealed unsafe partial class Pool
    {
        /// <summary>More than any layer has: a row of keys takes half a byte a channel, and fits a
        /// slab of 2 MiB.</summary>
        private const ulong MostChannels = 1 << 22;

        /// <summary>Measures the constants of <see cref="StorageFormat.Affine4"/> for one layer on
        /// the retained keys of a sequence. The pool stores keys in f16, say, and its layers have a
        /// <see cref="Rope"/>. Some hundred tokens suffice, of a text like those that will be read.
        /// <see cref="Status.Limit"/>: fewer than 64 tokens.</summary>
        /// <param name="sequence">The sequence.</param>
        /// <param name="layer">The layer.</param>
        /// <param name="kvHeads">The layer's KV heads.</param>
        /// <param name="keyDim">The layer's dimensions of keys.</param>
        /// <param name="first">Positions before it are left out.</param>
        /// <param name="tokens">Positions from there on; 0: all.</param>
        public AffineFit FitAffine(Sequence sequence, uint layer, uint kvHeads, uint keyDim,
                                   ulong first = 0, ulong tokens = 0)
        {
            ulong channels = (ulong)kvHeads * keyDim;
            if (channels == 0 || channels > MostChannels)
            {
                throw new KvrtArgumentException(
                    Status.Invalid, $"no layer has {kvHeads} KV heads of {keyDim} channels");
            }
            float[] means = new float[channels], scales = new float[channels];
            kv_affine_fit fit = default;
            fit.struct_size = (uint)sizeof(kv_affine_fit);
            fit.layer = layer;
            fit.kv_heads = kvHeads;
            fit.key_dim = keyDim;
            fit.first_position = first;
            fit.tokens = tokens;
            int status;
            PoolLease lease = Enter();
            try
            {
                fixed (float* channelMeans = means)
                fixed (float* channelScales = scales)
                {
                    fit.channel_means = channelMeans;
                    fit.channel_scales = channelScales;
                    status = NativeMethods.kv_seq_fit_affine(lease.Pool, sequence.Handle, &fit);
                }
            }
            finally
            {
                lease.Release();
            }
            Finish(status);
            return new AffineFit(fit, means, scales);
        }
    }

    /// <summary>Constants of <see cref="StorageFormat.Affine4"/> for one layer. Arrays are
    /// [kv_heads, key_dim].</summary>
    public sealed class AffineFit
    {
        internal AffineFit(in kv_affine_fit fit, float[] means, float[] scales)
        {
            KvHeads = fit.kv_heads;
            KeyDim = fit.key_dim;
            ChannelMeans = means;
            ChannelScales = scales;
            TokensUsed = fit.tokens_used;
            Identity = fit.identity;
        }

        /// <summary>The layer's KV heads.</summary>
        public uint KvHeads { get; }

        /// <summary>The layer's dimensions of keys.</summary>
        public uint KeyDim { get; }

        /// <summary>Means of the keys before rotation.</summary>
        public float[] ChannelMeans { get; }

        /// <summary>Roots of the standard deviations behind rotation; both channels of a rotary
        /// pair have one.</summary>
        public float[] ChannelScales { get; }

        /// <summary>How many tokens were measured, of the KV head that holds the fewest.</summary>
        public ulong TokensUsed { get; }

        /// <summary><see cref="ExportedTables.KeyIdentity"/> of a layer that is stored with
        /// them.</summary>
        public ulong Identity { get; }

        /// <summary>What keys are stored with by these constants. It refers to the same
        /// arrays.</summary>
        public Storage ToStorage()
        {
            return new Storage
            {
                ChannelMeans = ChannelMeans, ChannelScales = ChannelScales, ChannelHeads = KvHeads,
                ChannelDim = KeyDim
            };
        }
    }
}
