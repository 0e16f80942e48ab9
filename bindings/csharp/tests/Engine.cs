// A stand-in for an engine: it makes up keys, values and queries for each token of a text, drives a
// pool with them, and knows by plain attention in double what must come back.
using System;
using System.Collections.Generic;
using System.Linq;

namespace Kvrt.Tests
{
    /// <summary>A pool with a small model, and steps over it.</summary>
    internal sealed class Engine : IDisposable
    {
        public const uint QueryHeads = 4, KvHeads = 2, Dim = 32;

        public Engine(
            Action<PoolConfig> configure = null, Action<Layer> shape = null, uint layers = 2)
        {
            Layers = layers;
            Layer layer = NewLayer();
            shape?.Invoke(layer);
            Format = layer.KeyFormat;
            var config = new PoolConfig { ArenaBytes = 8 << 20, Threads = 1 };
            configure?.Invoke(config);
            Pool = new Pool(config, new Model(Enumerable.Repeat(layer, (int)layers)));
        }

        public static Layer NewLayer()
        {
            return new Layer { QueryHeads = QueryHeads, KvHeads = KvHeads, KeyDim = Dim };
        }

        public Pool Pool { get; }

        public uint Layers { get; }

        public StorageFormat Format { get; }

        public void Dispose()
        {
            Pool.Dispose();
        }

        /// <summary>The keys, values or queries of a token of a text at a layer: [heads * dim].
        /// </summary>
        /// <param name="what">0: keys, 1: values, 2: queries.</param>
        /// <param name="text">Which text.</param>
        /// <param name="position">Where the token stands.</param>
        /// <param name="layer">The layer.</param>
        public static float[] Row(uint what, uint text, ulong position, uint layer)
        {
            uint heads = what == 2 ? QueryHeads : KvHeads;
            return Numbers.Stream((int)(heads * Dim),
                                  what + 3 * layer + 31 * (uint)position + 100003 * text);
        }

        public static float[] Rows(uint what, uint text, ulong first, uint count, uint layer)
        {
            return Enumerable.Range(0, (int)count)
                .SelectMany(i => Row(what, text, first + (ulong)i, layer)).ToArray();
        }

        /// <summary>What attention must give the token at `position` at a layer: [heads * dim].
        /// </summary>
        public double[] Expected(uint text, ulong position, uint layer, int[] seen = null)
        {
            seen = seen ?? Enumerable.Range(0, (int)position + 1).ToArray();
            var result = new List<double>();
            for (uint head = 0; head < QueryHeads; ++head)
            {
                uint kvHead = head / (QueryHeads / KvHeads);
                result.AddRange(Numbers.Attend(
                    Head(2, text, (int)position, layer, head),
                    token => Rounded(Head(0, text, token, layer, kvHead)),
                    token => Rounded(Head(1, text, token, layer, kvHead)), seen, out _));
            }
            return result.ToArray();
        }

        private double[] Rounded(double[] row)
        {
            return row.Select(value => Numbers.Stored(value, Format)).ToArray();
        }

        private static double[] Head(uint what, uint text, int position, uint layer, uint head)
        {
            return Row(what, text, (ulong)position, layer)
                .Skip((int)(head * Dim)).Take((int)Dim).Select(value => (double)value).ToArray();
        }

        /// <summary>Appends, reserves, writes and attends the next `rows` tokens of a text as one
        /// step, which stays open: [layers][rows * heads * dim].</summary>
        public float[][] Forward(Step step, Sequence sequence, uint text, uint rows)
        {
            AppendInfo info = step.Append(sequence, rows);
            step.Reserve();
            return Enumerable.Range(0, (int)Layers)
                .Select(layer => Forward(step, text, info.FirstPosition, rows, (uint)layer))
                .ToArray();
        }

        private static float[] Forward(Step step, uint text, ulong first, uint rows, uint layer)
        {
            var stored = new TensorLayout(rows, KvHeads, Dim);
            var asked = new TensorLayout(rows, QueryHeads, Dim);
            var results = new float[rows * QueryHeads * Dim];
            step.Write(layer, ReadOnlyTensor.Float32(Rows(0, text, first, rows, layer), stored),
                       ReadOnlyTensor.Float32(Rows(1, text, first, rows, layer), stored));
            step.Attend(layer, ReadOnlyTensor.Float32(Rows(2, text, first, rows, layer), asked),
                        Tensor.Float32(results, asked));
            return results;
        }

        /// <summary>Forward, and the end of the step.</summary>
        public StepReport Run(Sequence sequence, uint text, uint rows)
        {
            using (Step step = Pool.BeginStep())
            {
                Forward(step, sequence, text, rows);
                return step.End();
            }
        }

        /// <summary>Runs one more token of a text, and compares every layer with plain attention
        /// over the tokens seen.</summary>
        public void CheckNext(Sequence sequence, uint text, int[] seen = null)
        {
            using (Step step = Pool.BeginStep())
            {
                ulong position = Pool.GetInfo(sequence).Accepted;
                float[][] results = Forward(step, sequence, text, 1);
                for (uint layer = 0; layer < Layers; ++layer)
                {
                    Check.Close(Expected(text, position, layer, seen),
                                results[layer].Select(value => (double)value).ToArray(), 2e-5,
                                $"text {text}, position {position}, layer {layer}");
                }
                step.End();
            }
        }
    }
}
