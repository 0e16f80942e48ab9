// Attention through the binding against plain attention in double: element types, storage formats,
// strides, offsets.
using System;
using System.Linq;

namespace Kvrt.Tests
{
    internal static class AttentionTests
    {
        private const uint Text = 5;

        [Test]
        public static void EveryStorageFormatGivesWhatPlainAttentionGives()
        {
            foreach (StorageFormat format in new[]
                     { StorageFormat.Default, StorageFormat.Float32, StorageFormat.Float16,
                       StorageFormat.BFloat16 })
            {
                using (var engine = new Engine(shape: layer => layer.KeyFormat = format))
                {
                    Sequence sequence = engine.Pool.CreateSequence();
                    engine.Run(sequence, Text, 37); // crosses blocks
                    engine.CheckNext(sequence, Text);
                    engine.Pool.Check();
                }
            }
        }

        [Test]
        public static void HalfPrecisionGoesInAndOut()
        {
            CheckBits(DataType.Float16, 1e-3);
        }

        [Test]
        public static void BFloat16GoesInAndOut()
        {
            CheckBits(DataType.BFloat16, 8e-3);
        }

        /// <summary>Three tokens given as bits, keys behind three unused elements; the expectation
        /// starts from those bits.</summary>
        private static void CheckBits(DataType type, double tolerance)
        {
            const uint Rows = 3;
            using (var engine = new Engine(
                shape: layer => layer.KeyFormat = StorageFormat.Float32, layers: 1))
            {
                ushort[][] bits = Enumerable.Range(0, 3)
                    .Select(what => Numbers.ToBits(Engine.Rows((uint)what, Text, 0, Rows, 0), type))
                    .ToArray();
                var results = new ushort[Rows * Engine.QueryHeads * Engine.Dim];
                var stored = new TensorLayout(Rows, Engine.KvHeads, Engine.Dim);
                var behind = new TensorLayout(Rows, Engine.KvHeads, Engine.Dim, 0, 0, 0, 3);
                var asked = new TensorLayout(Rows, Engine.QueryHeads, Engine.Dim);
                Sequence sequence = engine.Pool.CreateSequence();
                using (Step step = engine.Pool.BeginStep())
                {
                    step.Append(sequence, Rows);
                    step.Reserve();
                    step.Write(0, View(new ushort[3].Concat(bits[0]).ToArray(), type, behind),
                               View(bits[1], type, stored));
                    step.Attend(0, View(bits[2], type, asked),
                                type == DataType.Float16 ? Tensor.Float16(results, asked)
                                                         : Tensor.BFloat16(results, asked));
                    step.End();
                }
                Check.Close(Expected(bits, type, Rows), Numbers.FromBits(results, type), tolerance,
                            type.ToString());
            }
        }

        private static ReadOnlyTensor View(ushort[] bits, DataType type, TensorLayout layout)
        {
            return type == DataType.Float16 ? ReadOnlyTensor.Float16(bits, layout)
                                            : ReadOnlyTensor.BFloat16(bits, layout);
        }

        private static double[] Expected(ushort[][] bits, DataType type, uint rows)
        {
            double[][] numbers = bits.Select(part => Numbers.FromBits(part, type)).ToArray();
            return Enumerable.Range(0, (int)(rows * Engine.QueryHeads)).SelectMany(index =>
            {
                int row = index / (int)Engine.QueryHeads;
                int head = index % (int)Engine.QueryHeads;
                int kvHead = head / (int)(Engine.QueryHeads / Engine.KvHeads);
                return Numbers.Attend(
                    Head(numbers[2], row * (int)Engine.QueryHeads + head),
                    token => Head(numbers[0], token * (int)Engine.KvHeads + kvHead),
                    token => Head(numbers[1], token * (int)Engine.KvHeads + kvHead),
                    Enumerable.Range(0, row + 1).ToArray(), out _);
            }).ToArray();
        }

        private static double[] Head(double[] values, int index)
        {
            return values.Skip(index * (int)Engine.Dim).Take((int)Engine.Dim).ToArray();
        }

        /// <summary>Queries, keys and values lie packed in one buffer, as a fused projection leaves
        /// them, and results go into every second row of another, last row first.</summary>
        [Test]
        public static void StridedViewsGiveTheBitsOfDenseOnes()
        {
            const uint Rows = 20;
            const uint Query = Engine.QueryHeads * Engine.Dim, Stored = Engine.KvHeads * Engine.Dim;
            const uint RowSize = Query + 2 * Stored;
            using (var engine = new Engine(layers: 1))
            {
                Sequence dense = engine.Pool.CreateSequence();
                Sequence strided = engine.Pool.CreateSequence();
                float[] expected;
                using (Step step = engine.Pool.BeginStep())
                {
                    expected = engine.Forward(step, dense, Text, Rows)[0];
                    step.End();
                }
                var packed = new float[Rows * RowSize];
                for (uint row = 0; row < Rows; ++row)
                {
                    Engine.Row(2, Text, row, 0).CopyTo(packed, row * RowSize);
                    Engine.Row(0, Text, row, 0).CopyTo(packed, row * RowSize + Query);
                    Engine.Row(1, Text, row, 0).CopyTo(packed, row * RowSize + Query + Stored);
                }
                var results = new float[2 * Rows * Query];
                using (Step step = engine.Pool.BeginStep())
                {
                    step.Append(strided, Rows);
                    step.Reserve();
                    step.Write(0,
                        ReadOnlyTensor.Float32(packed, Part(Engine.KvHeads, Query)),
                        ReadOnlyTensor.Float32(packed.AsSpan((int)(Query + Stored)),
                                               Part(Engine.KvHeads, 0)));
                    step.Attend(0, ReadOnlyTensor.Float32(packed, Part(Engine.QueryHeads, 0)),
                        Tensor.Float32(results, new TensorLayout(
                            Rows, Engine.QueryHeads, Engine.Dim, -2 * (long)Query, Engine.Dim, 1,
                            2 * (Rows - 1) * Query)));
                    step.End();
                }
                for (uint row = 0; row < Rows; ++row)
                {
                    Check.SameElements(
                        expected.Skip((int)(row * Query)).Take((int)Query),
                        results.Skip((int)(2 * (Rows - 1 - row) * Query)).Take((int)Query),
                        $"row {row}");
                }
            }
        }

        private static TensorLayout Part(uint heads, long offset)
        {
            const long RowSize = (Engine.QueryHeads + 2 * Engine.KvHeads) * Engine.Dim;
            return new TensorLayout(20, heads, Engine.Dim, RowSize, Engine.Dim, 1, offset);
        }

        [Test]
        public static void LogSumExpIsTheNaturalLogarithm()
        {
            const uint Rows = 5;
            using (var engine = new Engine(
                shape: layer => layer.KeyFormat = StorageFormat.Float32, layers: 1))
            {
                Sequence sequence = engine.Pool.CreateSequence();
                var logarithms = new float[Rows * Engine.QueryHeads];
                var asked = new TensorLayout(Rows, Engine.QueryHeads, Engine.Dim);
                float[] queries = Engine.Rows(2, Text, 0, Rows, 0);
                using (Step step = engine.Pool.BeginStep())
                {
                    engine.Forward(step, sequence, Text, Rows);
                    step.Attend(0, ReadOnlyTensor.Float32(queries, asked),
                                Tensor.Float32(new float[queries.Length], asked), logarithms,
                                AttendOptions.NoStatistics);
                    step.End();
                }
                double[] keys = Engine.Rows(0, Text, 0, Rows, 0).Select(k => (double)k).ToArray();
                double[] asDouble = queries.Select(q => (double)q).ToArray();
                double[] expected = Enumerable.Range(0, logarithms.Length).Select(index =>
                {
                    int kvHead = index % 4 / 2;
                    Numbers.Attend(Head(asDouble, index), token => Head(keys, token * 2 + kvHead),
                                   token => new double[1],
                                   Enumerable.Range(0, index / 4 + 1).ToArray(), out double sum);
                    return sum;
                }).ToArray();
                Check.Close(expected, logarithms.Select(l => (double)l).ToArray(), 1e-5,
                            "log-sum-exp");
            }
        }

        [Test]
        public static void ManySequencesOfOneStepDoNotMix()
        {
            using (var engine = new Engine())
            {
                Pool pool = engine.Pool;
                Sequence[] sequences = { pool.CreateSequence(), pool.CreateSequence() };
                engine.Run(sequences[0], 1, 9);
                engine.Run(sequences[1], 2, 21);
                uint[] counts = { 1, 1 };
                var infos = new AppendInfo[2];
                float[] keys = Engine.Row(0, 1, 9, 0).Concat(Engine.Row(0, 2, 21, 0)).ToArray();
                float[] values = Engine.Row(1, 1, 9, 0).Concat(Engine.Row(1, 2, 21, 0)).ToArray();
                float[] queries = Engine.Row(2, 1, 9, 0).Concat(Engine.Row(2, 2, 21, 0)).ToArray();
                var results = new float[queries.Length];
                var stored = new TensorLayout(2, Engine.KvHeads, Engine.Dim);
                var asked = new TensorLayout(2, Engine.QueryHeads, Engine.Dim);
                using (Step step = pool.BeginStep())
                {
                    step.AppendBatch(sequences, counts, new uint[] { 70, 71 }, infos);
                    step.Reserve();
                    step.Write(0, ReadOnlyTensor.Float32(keys, stored),
                               ReadOnlyTensor.Float32(values, stored));
                    step.Attend(0, ReadOnlyTensor.Float32(queries, asked),
                                Tensor.Float32(results, asked));
                    step.Cancel();
                }
                Check.Equal(9UL, infos[0].FirstPosition, "first position of item 0");
                Check.Equal(21UL, infos[1].FirstPosition, "first position of item 1");
                Check.Equal(1u, infos[1].Item, "item");
                Check.Equal(1u, infos[1].FirstRow, "row");
                Check.Close(engine.Expected(1, 9, 0).Concat(engine.Expected(2, 21, 0)).ToArray(),
                            results.Select(value => (double)value).ToArray(), 2e-5, "both");
            }
        }

        /// <summary>A window of 8 with one sink: the query at 30 sees 0 and 23 to 30.</summary>
        [Test]
        public static void AWindowWithSinksIsRespected()
        {
            using (var engine = new Engine(shape: layer =>
            {
                layer.Window = 8;
                layer.WindowSinks = 1;
            }))
            {
                Sequence sequence = engine.Pool.CreateSequence();
                engine.Run(sequence, Text, 30);
                engine.CheckNext(sequence, Text, Enumerable.Range(23, 8).Prepend(0).ToArray());
            }
        }

        /// <summary>A sink logit beside one token of the same logit halves that token's weight.
        /// </summary>
        [Test]
        public static void SinkLogitsJoinTheDenominator()
        {
            using (var engine = new Engine(layers: 1, shape: layer =>
            {
                layer.SinkLogits = new float[Engine.QueryHeads];
                layer.KeyFormat = StorageFormat.Float32;
            }))
            {
                Sequence sequence = engine.Pool.CreateSequence();
                var stored = new TensorLayout(1, Engine.KvHeads, Engine.Dim);
                var asked = new TensorLayout(1, Engine.QueryHeads, Engine.Dim);
                float[] values = Engine.Row(1, Text, 0, 0);
                var results = new float[Engine.QueryHeads * Engine.Dim];
                using (Step step = engine.Pool.BeginStep())
                {
                    step.Append(sequence, 1);
                    step.Reserve();
                    step.Write(0, ReadOnlyTensor.Float32(new float[values.Length], stored),
                               ReadOnlyTensor.Float32(values, stored)); // logit 0 = ln 1
                    step.Attend(0, ReadOnlyTensor.Float32(new float[results.Length], asked),
                                Tensor.Float32(results, asked));
                    step.End();
                }
                double[] expected = Enumerable.Range(0, results.Length)
                    .Select(i => values[i / 64 * 32 + i % 32] / 2.0).ToArray();
                Check.Close(expected, results.Select(r => (double)r).ToArray(), 1e-6, "halved");
            }
        }

        [Test]
        public static void ASharedLayerAttendsOverAnothersCache()
        {
            Layer owner = Engine.NewLayer();
            Layer sharing = Engine.NewLayer();
            sharing.SharedLayer = 0;
            var config = new PoolConfig { ArenaBytes = 2 << 20, Threads = 1 };
            using (var pool = new Pool(config, new Model(new[] { owner, sharing })))
            {
                Sequence sequence = pool.CreateSequence();
                var stored = new TensorLayout(4, Engine.KvHeads, Engine.Dim);
                var asked = new TensorLayout(4, Engine.QueryHeads, Engine.Dim);
                float[] queries = Engine.Rows(2, Text, 0, 4, 0);
                float[] own = new float[queries.Length], shared = new float[queries.Length];
                using (Step step = pool.BeginStep())
                {
                    step.Append(sequence, 4);
                    step.Reserve();
                    step.Write(0, ReadOnlyTensor.Float32(Engine.Rows(0, Text, 0, 4, 0), stored),
                               ReadOnlyTensor.Float32(Engine.Rows(1, Text, 0, 4, 0), stored));
                    step.Attend(0, ReadOnlyTensor.Float32(queries, asked),
                                Tensor.Float32(own, asked));
                    step.Attend(1, ReadOnlyTensor.Float32(queries, asked),
                                Tensor.Float32(shared, asked));
                    step.End();
                }
                Check.True(own.Any(value => value != 0), "something was computed");
                Check.SameElements(own, shared, "the same queries over the same cache");
                Check.Equal(0UL, pool.GetLayerInfo(sequence, 1).Blocks,
                            "blocks of the sharing layer");
            }
        }
    }
}
