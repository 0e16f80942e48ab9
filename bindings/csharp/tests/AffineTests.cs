// Constants of channels: measured on keys whose means and deviations are known, and stored with.
using System;
using System.Linq;

namespace Kvrt.Tests
{
    internal static class AffineTests
    {
        private const int Tokens = 100, Channels = (int)(Engine.KvHeads * Engine.Dim);

        private static float Mean(int channel) => (channel - 20) / 8f;

        private static float Deviation(int channel) => (1 + channel % 5) / 4f;

        /// <summary>A channel's deviation above its mean at even positions, below at odd
        /// ones.</summary>
        private static float[] Keys()
        {
            return Enumerable.Range(0, Tokens * Channels).Select(i => Mean(i % Channels) +
                (i / Channels % 2 == 0 ? 1 : -1) * Deviation(i % Channels)).ToArray();
        }

        private static Layer Unrotated(StorageFormat keys, Storage storage = null)
        {
            Layer layer = Engine.NewLayer();
            layer.KeyFormat = keys;
            layer.ValueFormat = StorageFormat.Float32;
            layer.Rope = new Rope { Style = RopeStyle.None };
            layer.KeyStorage = storage;
            return layer;
        }

        private static Pool NewPool(Layer layer)
        {
            return new Pool(new PoolConfig { ArenaBytes = 2 << 20, Threads = 1 },
                            new Model(new[] { layer }));
        }

        /// <summary>Writes the keys, and compares attention with its definition.</summary>
        private static Sequence Fill(Pool pool, double tolerance)
        {
            Sequence sequence = pool.CreateSequence();
            var stored = new TensorLayout(Tokens, Engine.KvHeads, Engine.Dim);
            var asked = new TensorLayout(Tokens, Engine.QueryHeads, Engine.Dim);
            float[] keys = Keys(), values = Numbers.Stream(Tokens * Channels, 1);
            float[] queries = Numbers.Stream(2 * Tokens * Channels, 2);
            var results = new float[queries.Length];
            using (Step step = pool.BeginStep())
            {
                step.Append(sequence, Tokens);
                step.Reserve();
                step.Write(0, ReadOnlyTensor.Float32(keys, stored),
                           ReadOnlyTensor.Float32(values, stored));
                step.Attend(0, ReadOnlyTensor.Float32(queries, asked),
                            Tensor.Float32(results, asked));
                step.End();
            }
            for (int row = 0; row < Tokens * (int)Engine.QueryHeads; ++row)
            {
                int token = row / (int)Engine.QueryHeads, head = row % (int)Engine.QueryHeads / 2;
                double[] expected = Numbers.Attend(
                    Row(queries, row), t => Row(keys, t * (int)Engine.KvHeads + head),
                    t => Row(values, t * (int)Engine.KvHeads + head),
                    Enumerable.Range(0, token + 1).ToArray(), out _);
                Check.Close(expected, Row(results, row), tolerance, $"token {token}");
            }
            return sequence;
        }

        private static double[] Row(float[] rows, int index)
        {
            const int Dim = (int)Engine.Dim;
            return new ArraySegment<float>(rows, index * Dim, Dim)
                .Select(value => (double)value).ToArray();
        }

        private static double[] Wide(float[] numbers)
        {
            return numbers.Select(number => (double)number).ToArray();
        }

        [Test]
        public static void AFitGivesMeansAndRootsOfDeviations()
        {
            double[] means = Enumerable.Range(0, Channels).Select(c => (double)Mean(c)).ToArray();
            double[] scales = Enumerable.Range(0, Channels)
                .Select(channel => Math.Sqrt(Deviation(channel))).ToArray();
            using (Pool pool = NewPool(Unrotated(StorageFormat.Float32)))
            {
                Sequence sequence = Fill(pool, 1e-4);
                AffineFit fit = pool.FitAffine(sequence, 0, Engine.KvHeads, Engine.Dim);
                Check.Equal(100UL, fit.TokensUsed, "tokens");
                Check.Equal(Engine.KvHeads, fit.KvHeads, "heads");
                Check.Equal(Engine.Dim, fit.KeyDim, "dimensions");
                Check.Close(means, Wide(fit.ChannelMeans), 1e-6, "means");
                Check.Close(scales, Wide(fit.ChannelScales), 1e-6, "scales");
                fit = pool.FitAffine(sequence, 0, Engine.KvHeads, Engine.Dim, 10, 70);
                Check.Equal(70UL, fit.TokensUsed, "tokens of a part");
                Check.Close(means, Wide(fit.ChannelMeans), 1e-6, "means of a part");
                fit = pool.FitAffine(sequence, 0, Engine.KvHeads, Engine.Dim, first: 36);
                Check.Equal(64UL, fit.TokensUsed, "tokens of the rest");
            }
        }

        [Test]
        public static void AFitThatCannotBeIsAnError()
        {
            using (Pool pool = NewPool(Unrotated(StorageFormat.Float16)))
            {
                Sequence sequence = Fill(pool, 1e-2);
                Check.Fails(Status.Invalid, "layer 1", () => pool.FitAffine(sequence, 1, 2, 32));
                Check.Fails(Status.Invalid, "[2, 31]", () => pool.FitAffine(sequence, 0, 2, 31));
                Check.Fails(Status.Invalid, "[4, 32]", () => pool.FitAffine(sequence, 0, 4, 32));
                Check.Fails(Status.Invalid, "0 KV heads", () => pool.FitAffine(sequence, 0, 0, 32));
                Check.Fails(Status.Invalid, "no layer has 4294967295 KV heads",
                            () => pool.FitAffine(sequence, 0, uint.MaxValue, uint.MaxValue));
                Check.Fails(Status.Limit, "63", () => pool.FitAffine(sequence, 0, 2, 32, 0, 63));
                Check.Fails(Status.Limit, "0 such", () => pool.FitAffine(
                    sequence, 0, 2, 32, ulong.MaxValue, ulong.MaxValue));
                pool.ReleaseSequence(sequence);
                Check.Fails(Status.Stale, "", () => pool.FitAffine(sequence, 0, 2, 32));
                pool.Dispose();
                Check.Throws<ObjectDisposedException>(
                    () => pool.FitAffine(sequence, 0, 2, 32), "a closed pool");
            }
            Layer untold = Unrotated(StorageFormat.Float16);
            untold.Rope = null;
            using (Pool pool = NewPool(untold))
            {
                Check.Fails(Status.Invalid, "rope",
                            () => pool.FitAffine(Fill(pool, 1e-2), 0, 2, 32));
            }
        }

        [Test]
        public static void KeysAreStoredWithTheConstants()
        {
            AffineFit fit;
            using (Pool pool = NewPool(Unrotated(StorageFormat.Float16)))
            {
                fit = pool.FitAffine(Fill(pool, 1e-2), 0, Engine.KvHeads, Engine.Dim);
            }
            Check.Equal(fit.Identity, IdentityWith(fit.ToStorage()), "identity");
            fit.ChannelMeans[Channels - 1] += 0.5f;
            Check.True(fit.Identity != IdentityWith(fit.ToStorage()), "other constants");
        }

        private static ulong IdentityWith(Storage storage)
        {
            using (Pool pool = NewPool(Unrotated(StorageFormat.Affine4, storage)))
            {
                Sequence sequence = Fill(pool, 0.25);
                using (Step step = pool.BeginStep())
                {
                    step.Append(sequence, 1);
                    step.Reserve();
                    ExportedTables tables = step.Export(0, default);
                    // 4 bits of 32 channels, a scale and a minimum.
                    Check.Equal(16u + 4, tables.KeyWords * tables.KeyWordBytes, "bytes of a row");
                    return tables.KeyIdentity;
                }
            }
        }

        private static Storage Ones(uint heads, uint dim, int means, int scales)
        {
            return new Storage
            {
                ChannelHeads = heads, ChannelDim = dim, ChannelMeans = new float[means],
                ChannelScales = Enumerable.Repeat(1f, scales).ToArray()
            };
        }

        private static void Refused(string part, Layer layer, Status status = Status.Invalid)
        {
            Check.Fails(status, part, () => NewPool(layer).Dispose());
        }

        [Test]
        public static void ConstantsMustBeThereAndFit()
        {
            const StorageFormat Affine = StorageFormat.Affine4;
            Storage good = Ones(2, 32, 64, 64);
            NewPool(Unrotated(Affine, good)).Dispose();
            Refused("ChannelMeans holds 63 elements, 64 are needed",
                    Unrotated(Affine, Ones(2, 32, 63, 64)));
            Refused("ChannelScales holds 65 elements", Unrotated(Affine, Ones(2, 32, 64, 65)));
            Refused("ChannelScales holds 0 elements", Unrotated(Affine, Ones(2, 32, 64, 0)));
            Refused("ChannelMeans holds 1 elements, 18446744065119617025 are",
                    Unrotated(Affine, Ones(uint.MaxValue, uint.MaxValue, 1, 1)));
            Refused("[4, 16]", Unrotated(Affine, Ones(4, 16, 64, 64)));
            Refused("channel_means", Unrotated(Affine, new Storage
            {
                ChannelHeads = 2, ChannelDim = 32, ChannelScales = good.ChannelScales
            }));
            Refused("kv_seq_fit_affine", Unrotated(Affine));
            Refused("no use", Unrotated(StorageFormat.Q4_1, good));
            Layer layer = Unrotated(Affine, good);
            layer.Rope = null;
            Refused("KV_ROPE_NONE", layer);
            layer = Unrotated(Affine, good);
            layer.ValueFormat = StorageFormat.Default;
            Refused("keys alone", layer, Status.Unsupported);
            layer.ValueFormat = Affine;
            Refused("keys alone", layer, Status.Unsupported);
            good.ChannelScales[3] = 0;
            Refused("channel_scales[3]", Unrotated(Affine, good));
        }
    }
}
