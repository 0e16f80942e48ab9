// The project file for the SDK, and mono's map. Read once, under mono: the XML classes of .NET Core
// 3.1 need an OpenSSL that current systems no longer have.
#if !NETCOREAPP
using System.IO;
using System.Linq;
using System.Xml;
using Kvrt.Native;

namespace Kvrt.Tests
{
    internal static class ProjectTests
    {
        private static string Project =>
            Path.Combine(Runner.Repository, "bindings", "csharp", "Kvrt");

        private static XmlDocument Load(string file)
        {
            var document = new XmlDocument { XmlResolver = null };
            document.LoadXml(File.ReadAllText(Path.Combine(Project, file))); // throws if ill-formed
            return document;
        }

        private static string Property(XmlDocument project, string name)
        {
            XmlNodeList nodes = project.SelectNodes($"/Project/PropertyGroup/{name}");
            Check.Equal(1, nodes.Count, name + " in the project file");
            return nodes[0].InnerText;
        }

        [Test]
        public static void TheProjectFileIsComplete()
        {
            XmlDocument project = Load("Kvrt.csproj");
            Check.Equal("Microsoft.NET.Sdk", project.DocumentElement.GetAttribute("Sdk"), "Sdk");
            Check.Equal("netstandard2.0;net8.0", Property(project, "TargetFrameworks"), "targets");
            Check.Equal("true", Property(project, "AllowUnsafeBlocks"), "unsafe");
            Check.Equal("Apache-2.0", Property(project, "PackageLicenseExpression"), "licence");
            string licence = File.ReadAllText(Path.Combine(Runner.Repository, "LICENSE"));
            Check.Contains("Apache License", licence, "the repository's licence");
            uint[] version = Property(project, "Version").Split('.').Select(uint.Parse).ToArray();
            Check.Equal(NativeConstants.KVRT_VERSION,
                        version[0] * 10000 + version[1] * 100 + version[2], "version");
            XmlNode memory = project.SelectSingleNode(
                "/Project/ItemGroup[contains(@Condition, 'netstandard2.0')]/PackageReference");
            Check.Equal("System.Memory", memory.Attributes["Include"].Value, "package for spans");
        }

        /// <summary>The SDK compiles every source file below the project file; the scripts compile
        /// those of two folders.</summary>
        [Test]
        public static void EverySourceFileIsCompiled()
        {
            Check.Equal(0, Load("Kvrt.csproj").SelectNodes("//Compile").Count, "exceptions");
            string[] compiled = Directory.GetFiles(Project, "*.cs")
                .Concat(Directory.GetFiles(Path.Combine(Project, "Native"), "*.cs")).ToArray();
            Check.SameElements(
                Directory.GetFiles(Project, "*.cs", SearchOption.AllDirectories).OrderBy(f => f),
                compiled.OrderBy(f => f), "source files");
        }

        [Test]
        public static void WhatThePackageHoldsIsThere()
        {
            foreach (XmlNode item in Load("Kvrt.csproj").SelectNodes("//None[@Pack='true']"))
            {
                string file = Path.Combine(Project, item.Attributes["Include"].Value);
                Check.True(File.Exists(file), file + " is missing");
            }
        }

        [Test]
        public static void TheMapOfMonoIsForTheRawLayersName()
        {
            XmlNode map = Load("Kvrt.dll.config").SelectSingleNode("/configuration/dllmap");
            Check.Equal(NativeMethods.LibraryName, map.Attributes["dll"].Value, "name");
        }
    }
}
#endif
