"""Pictures and pages made of plain records: inline SVG and one HTML file, no libraries, no scripts."""
