// What the language's types let through: null, empty, wrong lengths, wrong types, overflow.
using System;
using System.Collections.Generic;
using System.Linq;

namespace Kvrt.Tests
{
    internal static class BadInputTests
    {
        private static readonly PoolConfig Small =
            new PoolConfig { ArenaBytes = 2 << 20, Threads = 1 };

        private static Model With(Action<Layer> change)
        {
            Layer layer = Engine.NewLayer();
            change(layer);
            return new Model(new[] { layer });
        }

        private static void Refused(Status status, string part, Model model)
        {
            Check.Fails(status, part, () => new Pool(Small, model).Dispose());
            Check.Fails(status, part, () => Pool.Plan(Small, model));
        }

        [Test]
        public static void NullIsNamed()
        {
            Model model = With(layer => { });
            NamesParameter("config", () => new Pool(null, model));
            NamesParameter("model", () => new Pool(Small, null));
            NamesParameter("config", () => Pool.Plan(null, model));
            NamesParameter("model", () => Pool.Plan(Small, null));
            NamesParameter("layers", () => new Model(null));
            NamesParameter("layers", () => new Model(new Layer[1]));
            using (var engine = new Engine())
            {
                Pool pool = engine.Pool;
                Sequence sequence = pool.CreateSequence();
                NamesParameter("statistics", () => pool.SetStatistics(null));
                NamesParameter("statistics", () => pool.GetStatistics(sequence, null));
                NamesParameter("path", () => pool.LoadStatistics(null));
                NamesParameter("path", () => pool.SaveStatistics(sequence, null));
            }
        }

        private static void NamesParameter(string name, Action action)
        {
            Check.Equal(name, Check.Throws<ArgumentNullException>(action, name).ParamName, "name");
        }

        [Test]
        public static void ConfigurationsAreChecked()
        {
            Model model = With(layer => { });
            Check.Fails(Status.Invalid, "arena_bytes", () => new Pool(new PoolConfig(), model));
            Check.Fails(Status.TooLarge, "arena_bytes", () => new Pool(
                new PoolConfig { ArenaBytes = 1UL << 40 }, model));
            Check.Fails(Status.Invalid, "block_tokens", () => new Pool(
                new PoolConfig { ArenaBytes = 2 << 20, BlockTokens = 17 }, model));
            Check.Fails(Status.Unsupported, "", () => new Pool(
                new PoolConfig { ArenaBytes = 2 << 20, Device = Device.Cuda }, model));
            Check.Fails(Status.Unsupported, "layout", () => new Pool(
                new PoolConfig { ArenaBytes = 2 << 20, Layout = (BlockLayout)9 }, model));
            Check.Throws<KvrtException>(() => new Pool(
                new PoolConfig { ArenaBytes = 2 << 20, Options = (PoolOptions)(1u << 31) }, model),
                "an unknown option");
        }

        [Test]
        public static void ModelsAreChecked()
        {
            Refused(Status.Invalid, "", new Model(Enumerable.Empty<Layer>()));
            Refused(Status.Invalid, "layer 0", With(layer => layer.QueryHeads = 3));
            Refused(Status.Unsupported, "layer 0", With(layer => layer.KeyDim = 31));
            Refused(Status.Unsupported, "layer 0",
                    With(layer => layer.KeyFormat = (StorageFormat)77));
            Refused(Status.Invalid, "layer 0", With(layer => layer.SharedLayer = 0));
        }

        /// <summary>The library reads as many elements as it computes from the layer.</summary>
        [Test]
        public static void ArraysOfLayersHaveTheRightLength()
        {
            foreach (int length in new[] { 0, 3, 5 })
            {
                Refused(Status.Invalid, "SinkLogits",
                        With(layer => layer.SinkLogits = new float[length]));
                Refused(Status.Invalid, "AlibiSlopes",
                        With(layer => layer.AlibiSlopes = new float[length]));
            }
            foreach (uint dimensions in new uint[] { 0, 16, uint.MaxValue })
            {
                Refused(Status.Invalid, "InverseFrequencies", With(layer => layer.Rope = new Rope
                {
                    Style = RopeStyle.Half, Dimensions = dimensions,
                    InverseFrequencies = new double[9]
                }));
            }
            Refused(Status.Invalid, "SinkLogits", With(layer =>
            {
                layer.QueryHeads = 1u << 31;
                layer.SinkLogits = new float[1];
            }));
            new Pool(Small, With(layer =>
            {
                layer.SinkLogits = new float[4];
                layer.AlibiSlopes = new float[4];
                layer.Rope = new Rope { InverseFrequencies = new double[16] };
            })).Dispose();
        }

        [Test]
        public static void DenseTensorsFillTheirSpans()
        {
            var layout = new TensorLayout(3, 2, 32);
            foreach (int length in new[] { 0, 191, 193 })
            {
                Check.Fails(Status.Invalid, $"a span of {length} elements",
                            () => ReadOnlyTensor.Float32(new float[length], layout));
                Check.Fails(Status.Invalid, $"a span of {length} elements",
                            () => Tensor.BFloat16(new ushort[length], layout));
            }
            ReadOnlyTensor.Float16(new ushort[192], layout);
            // The product is 5 modulo 2^64.
            Check.Fails(Status.Invalid, "a span of 5 elements", () => ReadOnlyTensor.Float32(
                new float[5], new TensorLayout(609, 36760123, 823996703)));
        }

        /// <summary>Each layout reaches one element too far, at one end or the other, or overflows;
        /// with one more element at that end it fits.</summary>
        [Test]
        public static void StridedTensorsStayInTheirSpans()
        {
            var data = new float[100];
            ReadOnlyTensor.Float32(data, new TensorLayout(2, 3, 4, 50, 10, 5, 14)); // 14 + 50+20+15
            ReadOnlyTensor.Float32(data, new TensorLayout(2, 3, 4, -50, -10, -5, 85));
            TensorLayout[] beyond =
            {
                new TensorLayout(2, 3, 4, 50, 10, 5, 15),
                new TensorLayout(2, 3, 4, -50, -10, -5, 84),
                new TensorLayout(2, 3, 4, -50, -10, -5, 100),
                new TensorLayout(2, 3, 4, 0, 0, 0, 77), // dense, 24 elements from 77 on
                new TensorLayout(2, 3, 4, 0, 0, 0, -1),
                new TensorLayout(2, 1, 1, long.MaxValue, 1, 1),
                new TensorLayout(3, 1, 1, long.MaxValue, 1, 1),
                new TensorLayout(3, 1, 1, long.MinValue, 1, 1),
                new TensorLayout(uint.MaxValue, uint.MaxValue, uint.MaxValue),
                new TensorLayout(uint.MaxValue, uint.MaxValue, uint.MaxValue, 0, 0, 0, 1),
                new TensorLayout(1, 1, 1, 1, 1, 1, long.MaxValue),
                new TensorLayout(2, 2, 1, long.MaxValue, long.MaxValue, 1)
            };
            foreach (TensorLayout layout in beyond)
            {
                Check.Fails(Status.Invalid, "a span of 100 elements",
                            () => ReadOnlyTensor.Float32(data, layout));
            }
            ReadOnlyTensor.Float32(data, new TensorLayout(2, 3, 4, 0, 0, 0, 76));
            ReadOnlyTensor.Float32(data, new TensorLayout(100, 1, 1, 1, 0, 0));
        }

        /// <summary>What is read may overlap, such as one row for all; what is written may not. The
        /// expectation is a table of the places that the elements take.</summary>
        [Test]
        public static void ResultsDoNotLieOnEachOther()
        {
            var data = new float[300];
            long[] strides = { -12, -8, -5, -4, -1, 0, 1, 2, 3, 4, 6, 8, 12, 24, 40 };
            uint[] counts = { 1, 2, 3, 4 };
            int apart = 0, refused = 0;
            foreach (uint rows in counts)
            foreach (long rowStride in strides)
            foreach (long headStride in strides)
            foreach (long dimStride in new long[] { -1, 0, 1, 4 })
            {
                var layout = new TensorLayout(rows, 2, 4, rowStride, headStride, dimStride, 60);
                if (rowStride == 0 && headStride == 0 && dimStride == 0)
                {
                    continue; // dense
                }
                ReadOnlyTensor.Float32(data, layout);
                bool distinct = Places(layout).Distinct().Count() == rows * 2 * 4;
                try
                {
                    Tensor.Float32(data, layout);
                    Check.True(distinct, $"taken: {rows}, {rowStride}, {headStride}, {dimStride}");
                    ++apart;
                }
                catch (KvrtArgumentException error)
                {
                    Check.Contains("lie on each other", error.Message, "message");
                    refused += distinct ? 0 : 1;
                }
            }
            Check.True(apart > 100 && refused > 100, $"{apart} taken, {refused} refused");
            Tensor.Float32(data, new TensorLayout(3, 2, 4, 8, 4, 1)); // rows of heads
            Tensor.Float32(data, new TensorLayout(3, 2, 4, 4, 12, 1)); // heads of rows
            Tensor.Float32(data, new TensorLayout(3, 2, 4, 1, 12, 3)); // rows innermost
            Tensor.Float32(data, new TensorLayout(1, 1, 4, long.MinValue, 0, 1));
            Tensor.Float16(new ushort[8], new TensorLayout(0, 2, 4, 0, 0, 1));
            Check.Fails(Status.Invalid, "lie on each other",
                        () => Tensor.BFloat16(new ushort[8], new TensorLayout(3, 2, 4, 0, 4, 1)));
        }

        private static IEnumerable<long> Places(TensorLayout layout)
        {
            for (long row = 0; row < layout.Rows; ++row)
            for (long head = 0; head < layout.Heads; ++head)
            for (long dim = 0; dim < layout.Dim; ++dim)
            {
                yield return row * layout.RowStride + head * layout.HeadStride +
                             dim * layout.DimStride;
            }
        }

        [Test]
        public static void ShapesAreThoseOfTheStep()
        {
            using (var engine = new Engine())
            {
                Sequence sequence = engine.Pool.CreateSequence();
                using (Step step = engine.Pool.BeginStep())
                {
                    var two = new TensorLayout(2, Engine.KvHeads, Engine.Dim);
                    var three = new TensorLayout(3, Engine.KvHeads, Engine.Dim);
                    var asked = new TensorLayout(2, Engine.QueryHeads, Engine.Dim);
                    var rows = new float[128];
                    var queries = new float[256];
                    Check.Fails(Status.Invalid, "", () => step.Write( // before reserve
                        0, ReadOnlyTensor.Float32(rows, two), ReadOnlyTensor.Float32(rows, two)));
                    step.Append(sequence, 2);
                    step.Reserve();
                    Check.Fails(Status.Invalid, "", () => step.Reserve()); // twice
                    Check.Fails(Status.Invalid, "values", () => step.Write(
                        0, ReadOnlyTensor.Float32(rows, two),
                        ReadOnlyTensor.Float32(new float[192], three)));
                    Check.Fails(Status.Invalid, "keys", () => step.Write(
                        0, default, ReadOnlyTensor.Float32(rows, two)));
                    Check.Fails(Status.Invalid, "layer 9", () => step.Write(
                        9, ReadOnlyTensor.Float32(rows, two), ReadOnlyTensor.Float32(rows, two)));
                    Check.Fails(Status.Invalid, "comes first", () => step.Attend( // not written
                        0, ReadOnlyTensor.Float32(queries, asked), Tensor.Float32(queries, asked)));
                    step.Write(0, ReadOnlyTensor.Float32(rows, two),
                               ReadOnlyTensor.Float32(rows, two));
                    Check.Fails(Status.Invalid, "out", () => step.Attend(
                        0, ReadOnlyTensor.Float32(queries, asked), default));
                    Check.Fails(Status.Invalid, "queries", () => step.Attend(
                        0, ReadOnlyTensor.Float32(rows, two), Tensor.Float32(queries, asked)));
                    Check.Fails(Status.Invalid, "logSumExp holds 7", () => step.Attend(
                        0, ReadOnlyTensor.Float32(queries, asked), Tensor.Float32(queries, asked),
                        new float[7]));
                    Check.Fails(Status.Unsupported, "", () => step.Attend(
                        0, ReadOnlyTensor.Float32(queries, asked), Tensor.Float32(queries, asked),
                        default, (AttendOptions)256));
                }
            }
        }

        [Test]
        public static void BatchesHaveOneLength()
        {
            using (var engine = new Engine())
            {
                Sequence[] two = { engine.Pool.CreateSequence(), engine.Pool.CreateSequence() };
                uint[] ones = { 1, 1 };
                using (Step step = engine.Pool.BeginStep())
                {
                    Check.Fails(Status.Invalid, "counts holds 1",
                                () => step.AppendBatch(two, new uint[1]));
                    Check.Fails(Status.Invalid, "tokenIds holds 3",
                                () => step.AppendBatch(two, ones, new uint[3]));
                    Check.Fails(Status.Invalid, "tokenIds holds 1", () => step.AppendBatch(
                        two, new[] { uint.MaxValue, uint.MaxValue }, new uint[1]));
                    Check.Fails(Status.Invalid, "infos holds 1",
                                () => step.AppendBatch(two, ones, default, new AppendInfo[1]));
                    Check.Fails(Status.Invalid, "items is 0", () => step.AppendBatch(
                        ReadOnlySpan<Sequence>.Empty, ReadOnlySpan<uint>.Empty));
                    Check.Fails(Status.Invalid, "", () => step.Append(two[0], 0));
                    Check.Fails(Status.Invalid, "",
                                () => step.Append(two[0], ReadOnlySpan<uint>.Empty));
                    Check.Fails(Status.Invalid, "", () => step.Reserve()); // nothing appended
                    Check.Fails(Status.Invalid, "item 1: ", () => step.AppendBatch(
                        new[] { two[0], two[0] }, ones));
                    step.AppendBatch(two, ones);
                    Check.Fails(Status.Invalid, "counts holds 3",
                                () => step.AcceptBatch(two, new uint[3]));
                }
            }
        }

        [Test]
        public static void LayersAndHeadsAreChecked()
        {
            using (var engine = new Engine())
            {
                Pool pool = engine.Pool;
                Sequence sequence = pool.CreateSequence();
                Check.Fails(Status.Invalid, "layer 2", () => pool.GetLayerInfo(sequence, 2));
                Check.Fails(Status.Invalid, "kv_head 2",
                            () => pool.GetPositions(sequence, 0, 2, Span<uint>.Empty));
                Check.Fails(Status.Invalid, "HOST_FENCES", () => pool.PassFence(1));
            }
        }

        [Test]
        public static void PoliciesAreChecked()
        {
            using (var engine = new Engine())
            {
                Pool pool = engine.Pool;
                Sequence sequence = pool.CreateSequence();
                Action<Policy>[] changes =
                {
                    policy => policy.Budget = 0, policy => policy.Scorer = (Scorer)99,
                    policy => policy.Selection = (Selection)99,
                    policy => policy.Options = (PolicyOptions)(1u << 31),
                    policy => policy.OffsetMax = 3
                };
                foreach (Action<Policy> change in changes)
                {
                    var policy = new Policy { Scorer = Scorer.Random, Budget = 8, Seed = 1 };
                    change(policy);
                    Check.Throws<KvrtArgumentException>(
                        () => pool.CreateSequence(policy), "create");
                    Check.Throws<KvrtArgumentException>(
                        () => pool.SetPolicy(sequence, policy), "set");
                    Check.Throws<KvrtArgumentException>(
                        () => pool.Compress(sequence, policy), "compress");
                }
                Check.Equal(1u, pool.GetStats().Sequences, "sequences");
            }
        }

        [Test]
        public static void StatisticsHaveTheLayersShape()
        {
            Check.Fails(Status.Invalid, "0 heads", () => new QueryStatistics(0, 0, 4));
            Check.Fails(Status.Invalid, "4294967295 heads",
                        () => new QueryStatistics(0, uint.MaxValue, uint.MaxValue));
            using (var engine = new Engine(shape: layer => layer.Rope =
                new Rope { Style = RopeStyle.Interleaved, Dimensions = 16 }))
            {
                Pool pool = engine.Pool;
                Sequence sequence = pool.CreateSequence();
                var right = new QueryStatistics(0, 4, 8 + 16) { Tokens = 1 };
                pool.SetStatistics(right);
                pool.GetStatistics(sequence, right);
                Check.Equal(0UL, right.Tokens, "nothing was gathered");
                Check.Fails(Status.Invalid, "tokens is 0", () => pool.SetStatistics(right));
                Check.Fails(Status.Invalid, "[4, 16]", () => pool.SetStatistics(
                    new QueryStatistics(0, 4, 16) { Tokens = 1 }));
                Check.Fails(Status.Invalid, "layer 2", () => pool.GetStatistics(
                    sequence, new QueryStatistics(2, 4, 24)));
                right.Tokens = 1;
                right.MeanReal[0] = float.NaN;
                Check.Fails(Status.Invalid, "not finite", () => pool.SetStatistics(right));
            }
        }

        [Test]
        public static void PathsHaveNoNul()
        {
            using (var engine = new Engine())
            {
                Sequence sequence = engine.Pool.CreateSequence();
                Check.Fails(Status.Invalid, "NUL", () => engine.Pool.LoadStatistics("a\0b"));
                Check.Fails(Status.Invalid, "NUL",
                            () => engine.Pool.SaveStatistics(sequence, "a\0b"));
                Check.Fails(Status.IO, "", () => engine.Pool.LoadStatistics(""));
            }
        }

        [Test]
        public static void ErrorsHaveAClassPerCategory()
        {
            foreach (Category category in Enum.GetValues(typeof(Category)))
            {
                var unknown = (Status)(-(int)category * 100 - 77);
                KvrtException error = KvrtExceptionOf(unknown, category);
                Check.Equal(category, error.Category, "category");
                Check.Equal(unknown, error.Status, "the number is kept");
                string expected = category == Category.Ok ? "KvrtException"
                                                          : "Kvrt" + category + "Exception";
                Check.Equal(expected, error.GetType().Name, "class");
            }
        }

        private static KvrtException KvrtExceptionOf(Status status, Category category)
        {
            return (KvrtException)typeof(KvrtException)
                .GetMethod("Create", System.Reflection.BindingFlags.NonPublic |
                                     System.Reflection.BindingFlags.Static)
                .Invoke(null, new object[] { status, category, "text", null });
        }
    }
}
